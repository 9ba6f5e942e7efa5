"""Files: a state and its model in safetensors, by name."""
