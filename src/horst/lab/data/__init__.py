"""Data sets. Appendix D's sparse linear classification and its max-margin solutions."""

from horst.lab.data.max_margin import NotSeparableError, max_margin
from horst.lab.data.separable import SeparableData, sparse_teacher_data

__all__ = ["NotSeparableError", "SeparableData", "max_margin", "sparse_teacher_data"]
