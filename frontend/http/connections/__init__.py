"""Sockets, TLS, uvicorn and signals: everything below the application."""
