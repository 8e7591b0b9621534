"""Models."""

from horst.lab.models.diagonal import DiagonalNetwork

__all__ = ["DiagonalNetwork"]
