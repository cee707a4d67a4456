"""Values of a call's arguments, as the model writes them, made valid JSON."""
