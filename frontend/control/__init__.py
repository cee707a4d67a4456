"""Control of an engine by a program: start and end, health, profiles, metrics, and calls of functions on workers."""
