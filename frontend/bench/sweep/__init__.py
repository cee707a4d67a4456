"""`quire bench sweep`: one benchmark over a grid of settings, with a table and plots of what came out."""
