"""Other libraries: their rules, states, checkpoints and files, and an optimizer in the place of PyTorch's."""
