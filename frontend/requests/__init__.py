"""What a caller asks for, as engine requests, and what comes back for each."""
