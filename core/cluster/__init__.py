"""Hosts that serve one model together: how they find, know and lose each other."""
