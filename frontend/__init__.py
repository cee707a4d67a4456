"""Everything with text in it: HTTP, the Python API, the command line. No torch in this process."""
