"""What outputs must match: read from requests, compiled in a process of their own."""
