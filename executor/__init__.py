"""Execution of steps: executors, workers, model runner, layers and models."""
