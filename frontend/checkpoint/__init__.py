"""Finding a checkpoint and reading what it says about itself."""
