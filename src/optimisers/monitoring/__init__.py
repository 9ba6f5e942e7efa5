"""Watching a training: norms of gradients and steps, a file of samples, heat maps."""
