"""One model at many sparsities, with the dense model in the same table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from horst.parameters.modes import Batch
from horst.pruning.method import Method
from horst.pruning.one_shot import Plan


def sweep(
    model: nn.Module,
    sparsities: Sequence[float],
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]],
    method: str | Method | None = None,
    data: Iterable[Batch] | None = None,
    sequential: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Prune ``model`` to each sparsity in turn, evaluate it, and leave it dense as it was, also after an error.

    Each level is pruned from the dense weights, of which a copy is kept, and is the model that
    :func:`horst.pruning.prune` makes with the same ``sequential``.

    Args:
        sparsities: Levels in [0, 1), evaluated in this order.
        evaluate: Function that is called with the dense model first, then at each level; returns named numbers.
        method: Method, as for :func:`horst.pruning.prune`.
        data: Batches, as for :func:`horst.pruning.prune`.
        sequential: Whether a block is calibrated on what the *pruned* blocks before it return, as in
            :func:`horst.pruning.prune`. That takes one calibration per level. False is much faster for many levels:
            data goes through the dense model once, and each layer keeps what all levels share, the norms of its inputs
            (Wanda) or the factor of its inverse Hessian (SparseGPT; one float32 matrix of inputs x inputs per layer,
            on the host).
        **options: ``pattern``, ``distribution``, ``layers``, ``include``, ``exclude``, ``samples``, ``device``,
            ``values`` and ``group_size`` of :func:`horst.pruning.prune`.

    Returns:
        One dictionary per level, the dense model's first: ``method``, ``sparsity`` as asked for,
        ``sparsity_of_pruned_layers`` and ``sparsity_of_all_weights`` as they are, and what ``evaluate`` returned.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)])
        >>> zeros = lambda model: {"zeros": sum(int((p == 0).sum()) for p in model.parameters())}
        >>> [row["zeros"] for row in sweep(model, [0.25, 0.75], evaluate=zeros)]
        [0, 48, 144]
    """
    plan = Plan(model, method=method, data=data, **options)
    if isinstance(plan.distribution, Mapping):
        raise ValueError("a mapping in distribution fixes each layer's sparsity: there is nothing to sweep.")
    if isinstance(sparsities, str) or not isinstance(sparsities, Iterable):
        raise TypeError(f"sparsities must be a list of fractions, got {sparsities!r}. For one level write [0.5].")
    sparsities = list(sparsities)  # gone through twice
    for sparsity in sparsities:
        plan.check_sparsity(sparsity)
    prepared = None if sequential else plan.prepare()
    dense = [layer.param.detach().clone() for layer in plan.found]

    def restore() -> None:
        for layer, weight in zip(plan.found, dense, strict=True):
            layer.param.detach().copy_(weight)

    rows = [{"method": "dense", "sparsity": 0.0, **plan.present().shares(), **_evaluated(evaluate, model)}]
    try:
        for sparsity in sparsities:
            restore()
            report = plan.prune(sparsity, sequential=True) if prepared is None else plan.apply(sparsity, prepared)
            rows.append(
                {"method": report.method, "sparsity": sparsity, **report.shares(), **_evaluated(evaluate, model)}
            )
    finally:
        restore()
    return rows


_OURS = ("method", "sparsity", "sparsity_of_pruned_layers", "sparsity_of_all_weights")


def _evaluated(evaluate: Callable[[nn.Module], Mapping[str, float]], model: nn.Module) -> dict[str, float]:
    metrics = evaluate(model)
    if not isinstance(metrics, Mapping) or set(metrics) & set(_OURS):
        raise TypeError(
            f"evaluate must return a mapping of named numbers, with names other than {', '.join(_OURS)}; got "
            f"{metrics!r}."
        )
    return dict(metrics)
