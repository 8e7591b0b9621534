"""Fused kernels of the lab's models: attention over few tokens, and the cross-entropy of a large vocabulary."""
