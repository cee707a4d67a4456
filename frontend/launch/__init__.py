"""From a user's options to running engines."""
