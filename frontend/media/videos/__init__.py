"""Videos: decoded and processed in helper processes. They need the extra `media`."""
