"""Methods of drafting, one file each, and what joins them: see `methods.py` for a new one."""
