"""The HTTP application and server. Only `app.py` knows the protocols."""
