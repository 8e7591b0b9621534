"""ADMM: train dense weights towards a sparse copy of them, and project them onto the sparse set at the end.

References: Lee et al., *SAFE: Finding Sparse and Flat Minima to Improve Pruning*, 2025; *ELSA*, 2026, which weighs the
projection by Adam's second moment and does without SAM. SAM: Foret et al., 2021.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Event, Options
from horst.sparsity.dense_until_end import DenseUntilEnd
from horst.sparsity.distributions import Distribution
from horst.sparsity.optimizer_hooks import before_update
from horst.sparsity.ramps import Ramp
from horst.sparsity.schedules import Refresh
from horst.user_warnings import warn_user


class ADMM(DenseUntilEnd):
    r"""Dense training with a pull towards a sparse copy of the weights (SAFE, ELSA); sparse at the last step.

    With weights :math:`w`, their sparse copy :math:`z` and the dual variable :math:`u`, the optimizer sees

    .. math:: g = \nabla L(w) + \lambda_t\, (w - z + u), \qquad
        \lambda_t = \tfrac{\lambda}{2} \left(1 - \cos(\pi \min(t / T_r, 1))\right)

    where :math:`\lambda, T_r` are ``penalty``, ``ramp``. Every ``every`` steps

    .. math:: z \leftarrow \Pi(w + u), \qquad u \leftarrow u + w - z

    where :math:`\Pi` keeps the largest entries, as many as pattern, sparsity and distribution say. It begins with
    :math:`z = \Pi(w), u = 0`. After ``steps`` steps the weights become :math:`\Pi(w)`. Their mask is fixed from then
    on, and training may go on with it.

    Until then the model is dense: ``current_sparsity`` is 0 and evaluations see dense weights. The pull is added after
    any clipping, inside ``optimizer.step()``; it respects ``GradScaler``. Memory: one tensor shaped like each masked
    weight (float32 where the weights are narrower) and its mask, since :math:`z` and :math:`u` share no entry.

    Args:
        sparsity: Share of zeros at the end, in [0, 1). None where the pattern fixes it (N:M).
        steps: Number of optimizer steps after which the weights are projected and the mask is fixed.
        penalty: Strength of the pull; 0.01 in ELSA, 1e-3 in SAFE.
        every: Number of steps from one choice of the sparse copy to the next.
        ramp: Number of steps over which the penalty rises; None is all of them, 0 the full penalty from the start.
        projection: Score of the projections: ``"magnitude"``, or ``"second_moment"``, the magnitude times the root of
            the optimizer's ``exp_avg_sq`` (ELSA). It needs an optimizer that has one, such as AdamW or HORST. As long
            as a masked weight has had no update, the score is the magnitude.
        sam_radius: Length of the ascent step of :meth:`ascended` (SAFE: 0.1 on images, 2e-4 on text); 0 for none. The
            loop of :mod:`horst.training` makes the second backward pass; in a loop of your own, you make it.
        distribution: Division of the zeros among the layers.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sparsifier = ADMM(model, optimizer, sparsity=0.75, steps=20, every=4, layers="all_linear")
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     event = sparsifier.step()
        ...     optimizer.zero_grad()
        >>> event
        Event(step=20, kind='prune', sparsity=0.75)
        >>> int((model.weight == 0).sum())
        24
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        steps: int,
        penalty: float = 0.01,
        every: int = 32,
        ramp: int | None = None,
        projection: Literal["magnitude", "second_moment"] = "magnitude",
        sam_radius: float = 0.0,
        distribution: Distribution = "uniform",
        **options: Unpack[Options],
    ) -> None:
        schedule = Refresh(every, end=steps)
        if not penalty >= 0.0:  # this form refuses NaN too
            raise ValueError(f"penalty must be at least 0, got {penalty}. ELSA uses 0.01.")
        if projection not in ("magnitude", "second_moment"):
            raise ValueError(f"projection must be 'magnitude' or 'second_moment', got {projection!r}.")
        if not sam_radius >= 0.0:
            raise ValueError(f"sam_radius must be at least 0, got {sam_radius}. Use 0 for no ascent step.")
        super().__init__(model, optimizer, sparsity=sparsity, schedule=schedule, distribution=distribution, **options)
        self.penalty = Ramp(penalty, steps if ramp is None else ramp, "cosine")
        self.projection, self.sam_radius = projection, sam_radius
        # By layer w + u at the last projection: it is u outside of the mask in view, where z is zero, and z inside.
        self._sum: dict[str, Tensor] = {}
        self._updated: set[int] = set()  # ids of the optimizers that have taken a step
        self._has_ascended = False
        self._start()

    def _add_hooks(self) -> None:
        self._handles += (before_update(opt, self._before_update) for opt in self.optimizers)
        super()._add_hooks()

    @property
    def wants_ascent(self) -> bool:
        """Whether the coming step is one of SAM: a second backward pass in :meth:`ascended`."""
        return self.sam_radius > 0.0 and not self.is_finished

    @contextlib.contextmanager
    def ascended(self) -> Iterator[None]:
        r"""SAM: the weights at :math:`w + \rho\, g / \|g\|`, for a second backward pass; put back on leaving.

        :math:`g` is the gradient of all trained parameters and :math:`\rho` is ``sam_radius``. Gradients are cleared on
        entry, so that the optimizer sees those of the second pass alone. Compute both passes on the same batch, with
        accumulation on all of its parts. It costs a copy of the trained weights and the second pass.

        Example:
            >>> model = nn.Linear(8, 4)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> sparsifier = ADMM(model, optimizer, sparsity=0.5, steps=9, sam_radius=0.1, layers="all_linear")
            >>> batch = torch.randn(4, 8)
            >>> model(batch).square().mean().backward()
            >>> with sparsifier.ascended():
            ...     model(batch).square().mean().backward()
            >>> optimizer.step()
            >>> event = sparsifier.step()
        """
        if self.sam_radius == 0.0:
            raise ValueError("ascended() needs a radius: ADMM(..., sam_radius=0.1). Without SAM leave the call out.")
        self._has_ascended = True
        params = [p for opt in self.optimizers for group in opt.param_groups for p in group["params"]]
        params = [p for p in params if p.grad is not None]
        if not params:
            raise RuntimeError("ascended() goes along the gradient, and there is none. Call loss.backward() first.")
        before = [local_shard(p).clone() for p in params]
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in params])
            if hasattr(norm, "full_tensor"):  # of sharded gradients, over all ranks
                norm = norm.full_tensor()
            factor = torch.where(norm > 0, self.sam_radius / norm, 0)  # no step where all gradients are zero
            for p in params:
                local_shard(p).add_(local_shard(p.grad) * factor)
                p.grad = None
        try:
            yield
        finally:
            for p, weight in zip(params, before, strict=True):
                local_shard(p).copy_(weight)

    def _begin(self) -> None:
        self._outside = self._select(self.sparsity)
        for layer in self.layers:
            kept = local_shard(layer.param).masked_fill(self._outside[layer.name], 0)
            self._sum[layer.name] = kept.to(torch.promote_types(kept.dtype, torch.float32))

    def _on_step(self) -> Event | None:
        if self.projection == "second_moment" and self.steps == 1:
            self._second_moments()  # an optimizer without them is refused now, not at the first projection
        return super()._on_step()

    def _choose_again(self) -> None:
        for layer in self.layers:  # w + u
            dual = torch.where(self._outside[layer.name], self._sum[layer.name], 0)
            self._sum[layer.name] = dual + local_shard(layer.param)
        self._outside = self._select(self.sparsity, self._scores(self._sum))

    def _apply_mask(self) -> Event:
        self._sum = {}
        return super()._apply_mask()

    def _scores(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        moments = self._second_moments() if self.projection == "second_moment" else None
        if moments is None:
            return weights
        return {name: weight * moments[name].to(weight.device).sqrt() for name, weight in weights.items()}

    def _second_moments(self) -> dict[str, Tensor] | None:
        """By layer, the average of squared gradients; None while a layer has had no update."""
        moments = {}
        for layer in self.layers:
            optimizer = self._owner[layer.name]
            state = optimizer.state.get(layer.param, {})
            if "exp_avg_sq" in state:
                moments[layer.name] = local_shard(state["exp_avg_sq"])
                continue
            if state or (id(optimizer) in self._updated and not any(optimizer.state.values())):
                raise ValueError(
                    f"projection='second_moment' weighs by exp_avg_sq, but the state of {type(optimizer).__name__} has "
                    f"{', '.join(sorted(state)) or 'no entries'}. Use AdamW or HORST, or projection='magnitude'."
                )
            return None
        return moments

    @torch.no_grad()
    def _before_update(self, optimizer: Optimizer) -> None:
        self._updated.add(id(optimizer))
        if self.wants_ascent and not self._has_ascended:
            self._has_ascended = True  # once is enough
            warn_user(
                f"sam_radius={self.sam_radius} has no effect: the optimizer takes its step without a second backward "
                "pass. Compute it in `with sparsifier.ascended():`, or leave sam_radius out."
            )
        penalty = self.penalty.at(self.steps)
        if self.is_finished or penalty == 0.0:
            return
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler where the optimizer itself unscales
        for layer in self._layers_of(optimizer):
            if layer.param.grad is not None:
                # z - u: w + u where z is kept, its opposite where it is not
                total, outside = self._sum[layer.name], self._outside[layer.name]
                pull = (local_shard(layer.param) - torch.where(outside, -total, total)).mul_(penalty)
                local_shard(layer.param.grad).add_(pull if scale is None else pull * scale)

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "sum": self._as_saved(self._sum)}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        super()._load_extra_state(state)
        self._sum = self._from_saved(state.get("sum", {}))
