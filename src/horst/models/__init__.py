"""Models."""

from horst.models.diagonal import DiagonalNetwork

__all__ = ["DiagonalNetwork"]
