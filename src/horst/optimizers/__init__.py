"""The optimizers, one algorithm per file."""
