"""The two executors: one worker in the engine process, or one process for each worker behind rings."""
