"""Helper processes for work on clients' data that may hang, crash or grow: killable, bounded, restarted."""
