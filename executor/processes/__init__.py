"""Where workers live and how plans reach them: one in the engine, or one process each behind rings."""
