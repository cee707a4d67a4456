"""`quire bench host`: the time of everything but the model, stage by stage, with a worker that answers at once."""
