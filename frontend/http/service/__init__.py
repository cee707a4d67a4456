"""Routes for the operator of a server, and what they answer with."""
