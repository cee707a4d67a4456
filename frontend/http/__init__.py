"""The HTTP application and server; no protocol's own fields."""
