"""Structs that cross a process boundary, and what a request may ask for."""
