"""What is counted and logged while the engine works."""
