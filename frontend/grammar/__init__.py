"""Grammars that outputs must match: read from requests, and compiled in helper processes."""
