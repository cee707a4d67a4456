"""`quire bench host`: what everything but the model costs, stage by stage, with a worker that answers at once."""
