"""What a program does with an engine beside its requests: profiles it, and runs code of its own on the workers."""
