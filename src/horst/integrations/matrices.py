"""HORST for trainers that make the parameter groups themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horst.optimizers.horst import HORST


class MatrixHORST(HORST):
    """HORST whose mirror step and ``l1`` are for tensors of two or more dimensions; others get AdamW's step.

    It is for trainers that decide themselves which tensors decay, and corresponds to
    ``horst.param_groups(model, mirror="matrices")``. Groups, state and checkpoints stay those of AdamW in the same
    trainer. In a group that brings its own ``alpha``, as those of :func:`horst.param_groups` do, all tensors get the
    mirror step.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = MatrixHORST(model.parameters(), lr=1e-3, alpha=5.0)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()  # the weight as with HORST, the bias as with AdamW
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own hyperparameters if given. An error changes nothing."""
        if isinstance(param_group, dict) and "alpha" in param_group:
            # among the defaults, so that a state without it (AdamW's) leaves it as it is
            self.defaults.setdefault("mirror_vectors", False)
            param_group = {"mirror_vectors": True, **param_group}
        super().add_param_group(param_group)

    def _choose_mirrored(self, group: dict[str, Any], params: list[Tensor]) -> list[bool]:
        if group.get("mirror_vectors"):
            return [True] * len(params)
        return [p.ndim >= 2 for p in params]
