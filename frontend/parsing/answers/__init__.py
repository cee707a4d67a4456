"""From a request's options to the parser and the grammar of its answers."""
