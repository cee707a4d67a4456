"""Structs that cross a process boundary, the parameters of requests among them."""
