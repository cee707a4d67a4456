"""How checkpoints write the weights of linear layers, one file a scheme."""
