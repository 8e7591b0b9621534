"""Fused operations, one folder each: a reference that reads like the paper, and the fast paths tied to it."""
