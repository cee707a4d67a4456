"""Which engine gets a request, where several hold the same model."""
