"""Grammar libraries, one file each, for the helper process only: see `quire.frontend.grammar.helper_process`."""
