"""The reasons why flags, fields, arguments, methods and environment variables of vLLM's are refused or ignored."""
