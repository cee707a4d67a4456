"""Studies of clusters that need no such hardware: an analytic model of one, and a simulation of many engines."""
