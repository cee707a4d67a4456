"""Models that draft for another one, whose hidden states they read."""
