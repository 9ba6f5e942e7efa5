"""What each optimiser library does with the same small inputs: `make compare`."""
