"""Control of an engine by a program: profiles, and calls of the program's functions on the workers."""
