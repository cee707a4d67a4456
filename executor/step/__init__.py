"""One step on one rank: a plan in, sampled tokens out."""
