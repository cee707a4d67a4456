"""`quire bench fleet`: the router and the schedulers of many engines, in virtual time and without a model."""
