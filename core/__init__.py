"""The engine's heart: options, wire structs, scheduling and page bookkeeping. Integers only: no torch, no text."""
