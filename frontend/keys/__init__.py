"""API keys: who calls, with which share and limits, and what each has used."""
