"""Grammar libraries, one file each; only the helper process (`quire.frontend.grammar.helper_process`) imports them."""
