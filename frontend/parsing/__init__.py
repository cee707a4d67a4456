"""Parses the text of a model's answer into events: content, reasoning and tool calls.

In this folder: the events, and what reads a text in pieces. In the rooms above: arguments, shapes of calls, formats of
models, and the parsers and grammars that requests choose among these.
"""
