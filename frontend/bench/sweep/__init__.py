"""`quire bench sweep`: runs one benchmark over a grid of settings, and shows the results as a table and plots."""
