"""Entries by id that the servers of one command store between requests. Any of the servers may read them."""
