"""Blocking use of the engine: batches of prompts, and a loop that the program drives itself."""
