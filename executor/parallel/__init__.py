"""Groups of ranks and their collectives."""
