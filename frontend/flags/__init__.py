"""Command-line flags that derive from option Structs: parsing, configuration files, help."""
