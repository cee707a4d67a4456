"""Makes running engines out of a user's options."""
