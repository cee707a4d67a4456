"""Which request runs next, for how many tokens; who is let in."""
