r"""Appendix D's data: standard normal inputs, labelled by a teacher with two non-zero coordinates, and its loss.

With :math:`z_i = y_i x_i`, the exponential loss of a linear model is
:math:`\mathcal{L}(\theta) = \frac1N \sum_i \exp(-\langle \theta, z_i \rangle)`, so the functions here take ``z`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SeparableData:
    """Data sets drawn alike, one per seed, stacked along the first dimension.

    Args:
        z: Inputs times labels, ``(seeds, samples, features)``: theta separates the data where ``z @ theta > 0``.
        teacher: Sparse teacher, ``(features,)``.
    """

    z: Tensor
    teacher: Tensor

    @property
    def support(self) -> Tensor:
        """Where the teacher is not zero."""
        return self.teacher != 0


def sparse_teacher_data(
    seeds: Sequence[int] = (0, 1, 2),
    *,
    n_samples: int = 80,
    n_features: int = 100,
    teacher: Sequence[float] = (1.0, 1.0),
    dtype: torch.dtype = torch.float64,
) -> SeparableData:
    r"""Draw :math:`x_i \sim \mathcal{N}(0, I)` and label :math:`y_i = \mathrm{sign} \langle \theta_\star, x_i \rangle`.

    Args:
        seeds: Seeds of the data sets, each with a generator of its own.
        n_samples: N of Appendix D.
        n_features: D of Appendix D.
        teacher: The values of the first coordinates of :math:`\theta_\star`; the others are zero.
        dtype: The data are drawn in float64 and then cast, so that every dtype sees the same numbers.

    Example:
        >>> data = sparse_teacher_data(seeds=(0,), n_samples=5, n_features=8)
        >>> data.z.shape, bool((data.z @ data.teacher > 0).all())
        (torch.Size([1, 5, 8]), True)

    References: Appendix D.
    """
    if not 0 < len(teacher) <= n_features:
        raise ValueError(f"teacher must have 1 to n_features={n_features} values, got {len(teacher)}.")
    if not all(value != 0 and math.isfinite(value) for value in teacher):
        raise ValueError(f"the teacher's values must be finite and not zero, got {tuple(teacher)}.")
    if len(seeds) == 0 or n_samples < 1:
        raise ValueError(f"need at least one seed and one sample, got seeds={tuple(seeds)}, n_samples={n_samples}.")
    full_teacher = torch.zeros(n_features, dtype=torch.float64)
    full_teacher[: len(teacher)] = torch.tensor(teacher, dtype=torch.float64)
    x = torch.stack(
        [
            torch.randn(n_samples, n_features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in seeds
        ]
    )
    z = x * torch.sign(x @ full_teacher).unsqueeze(-1)
    return SeparableData(z.to(dtype), full_teacher.to(dtype))


def log_loss(theta: Tensor, z: Tensor) -> Tensor:
    r""":math:`\log \mathcal{L}(\theta)`, which does not underflow where :math:`\mathcal{L}` does.

    Args:
        theta: ``(problems, runs, features)``.
        z: ``(problems, samples, features)``.

    Returns:
        ``(problems, runs)``.
    """
    return torch.logsumexp(-(theta @ z.mT), dim=-1) - math.log(z.shape[-2])


def loss_gradient(theta: Tensor, z: Tensor) -> Tensor:
    r""":math:`\nabla \mathcal{L}(\theta) = -\frac1N \sum_i \exp(-\langle \theta, z_i \rangle)\, z_i`, shapes as above.

    Example:
        >>> z = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
        >>> loss_gradient(torch.zeros(1, 1, 2), z)
        tensor([[[-0.5000, -1.0000]]])
    """
    return -(torch.exp(-(theta @ z.mT)) @ z) / z.shape[-2]
