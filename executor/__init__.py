"""Getting one step done: executors, workers, model runner, layers and models."""
