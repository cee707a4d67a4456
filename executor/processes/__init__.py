"""The two executors: one worker in the engine's process, or a process for each worker, connected by rings."""
