"""Models whose tokens see each other, and of which nothing is kept from step to step, one file a kind."""
