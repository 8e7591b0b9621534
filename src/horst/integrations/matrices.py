"""HORST for trainers that make the parameter groups themselves."""

from __future__ import annotations

from torch import Tensor

from horst.optimizers.horst import HORST


class MatrixHORST(HORST):
    """HORST whose mirror step is taken on tensors of two or more dimensions only; the others get AdamW's step.

    This is the default rule of :func:`horst.param_groups`, for trainers that decide themselves which tensors decay and
    leave no place for groups of ours. Groups, state and checkpoints stay those of AdamW in the same trainer.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = MatrixHORST(model.parameters(), lr=1e-3, alpha=5.0)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()  # the weight as with HORST, the bias as with AdamW
    """

    def _choose_mirrored(self, params: list[Tensor]) -> list[bool]:
        return [p.ndim >= 2 for p in params]
