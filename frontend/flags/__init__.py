"""Command-line flags that derive from option Structs: parsing, files of options, help."""
