"""A class's code as a traced program, whose calls become operations of the backend."""
