"""The optimizers, one algorithm a file."""
