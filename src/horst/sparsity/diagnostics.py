"""A record of masks and weights at every change of masks, and figures of it.

For each event, over all layers and by layer: sparsity; *overlap*, the share of kept weights that the previous sparse
mask kept too; *sign flips*, the share of weights kept both times whose sign changed in between; and by layer quantiles
of the magnitudes of kept weights. All are exact and summed over ranks; nothing is computed between events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horst.extras import load_extra
from horst.files import PathLike, write_json
from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Event, Sparsifier
from horst.sparsity.layers import Layer
from horst.sparsity.masks import load_bits, save_bits
from horst.sparsity.selection import kth_magnitude


class Recorder:
    """Records a sparsifier's events in :attr:`records`, a list of plain dictionaries.

    The sparsifier's ``state_dict`` holds what was recorded: a resumed run with a new recorder continues it.

    Args:
        sparsifier: The sparsifier to watch.
        quantiles: Quantiles of the kept weights' magnitudes to record, each in (0, 1]. They cost a selection per layer;
            overlap and sign flips cost a count.

    Example:
        >>> from horst.sparsity import GMP, Cubic
        >>> model = torch.nn.Linear(10, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> gmp = GMP(model, optimizer, sparsity=0.8, schedule=Cubic(1, 3, every=1), layers="all_linear")
        >>> recorder = Recorder(gmp)
        >>> for _ in range(3):
        ...     event = gmp.step()
        >>> [(r["step"], r["sparsity"], r["overlap"]) for r in recorder.records]
        [(1, 0.0, None), (2, 0.7, None), (3, 0.8, 1.0)]
    """

    def __init__(
        self, sparsifier: Sparsifier, *, quantiles: Sequence[float] = (0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
    ) -> None:
        if not all(0.0 < q <= 1.0 for q in quantiles):
            raise ValueError(f"quantiles must lie in (0, 1], got {list(quantiles)}.")
        self.records: list[dict[str, Any]] = []
        self._quantiles = tuple(quantiles)
        self._previous: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: kept, and negative, at the last sparse event
        sparsifier.observers.append(self)
        if sparsifier._unclaimed:  # resumed with state_dict= of its constructor, when there was no recorder yet
            self.load_state_dict(sparsifier._unclaimed.pop(0))

    @torch.no_grad()
    def __call__(self, sparsifier: Sparsifier, event: Event) -> None:
        """Note an event."""
        masks = sparsifier.masks
        layers, counts = {}, []
        for layer in sparsifier.layers:
            layers[layer.name], numbers = self._layer(sparsifier, layer, masks[layer.name])
            counts.append(numbers)
        totals = _shares(*map(sum, zip(*counts, strict=True)))
        record = {"step": event.step, "kind": event.kind, "sparsity": event.sparsity, **totals}
        self.records.append({**record, "layers": layers})

    def _layer(self, sparsifier: Sparsifier, layer: Layer, kept: Tensor) -> tuple[dict[str, Any], tuple[int, int, int]]:
        """The record of a layer, and the numbers of :func:`_shares`."""
        count = sparsifier._chooser.count
        total, n = layer.param.numel(), count(layer.name, kept)
        ranks = {q: max(1, math.ceil(q * n)) for q in self._quantiles if n}
        counts = (0, 0, 0)
        if sparsifier.is_sparse:
            negative = local_shard(layer.param) < 0
            if layer.name in self._previous:
                was_kept, was_negative = (load_bits(layer.param, bits) for bits in self._previous[layer.name])
                both = kept & was_kept
                flipped = both & (negative != was_negative)
                counts = (n, count(layer.name, both), count(layer.name, flipped))
            self._previous[layer.name] = (save_bits(layer.param, kept), save_bits(layer.param, negative))
        row = {
            "sparsity": 1.0 - n / total,
            **_shares(*counts),
            "quantiles": {str(q): kth_magnitude([layer.param], k, among=[kept]) for q, k in ranks.items()},
        }
        return row, counts

    def save(self, path: PathLike) -> None:
        """Write the records as JSON."""
        write_json(path, self.records)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints; the sparsifier's own ``state_dict`` has it."""
        return {"records": list(self.records), "previous": {name: list(bits) for name, bits in self._previous.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.records = list(state_dict["records"])
        self._previous = {name: (bits[0], bits[1]) for name, bits in state_dict["previous"].items()}


def _shares(kept: int, shared: int, flipped: int) -> dict[str, float | None]:
    """Of the weights kept now, those that the last sparse mask kept too; of these, those with another sign."""
    return {"overlap": shared / kept if kept else None, "sign_flips": flipped / shared if shared else None}


def plot(records: Sequence[Mapping[str, Any]], path: PathLike) -> None:
    """Draw the records of a run: overlap, sign flips, sparsity by layer, magnitudes.

    Args:
        records: :attr:`Recorder.records`, or what :meth:`Recorder.save` wrote.
        path: File of the figure; its ending chooses the format.
    """
    figure = load_extra("matplotlib.figure").Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    panels = [
        ("overlap", "kept weights that the last mask kept too"),
        ("sign_flips", "kept weights whose sign changed"),
        ("sparsity", "sparsity of each layer"),
    ]
    names = list(records[0]["layers"]) if records else []
    for ax, (key, title) in zip(axes.flat, panels, strict=False):
        for name in names:
            points = [(r["step"], r["layers"][name][key]) for r in records if r["layers"][name][key] is not None]
            ax.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=0.8, label=name)
        ax.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
    if len(names) <= 8:
        axes.flat[0].legend(fontsize="x-small")
    for q in list(records[0]["layers"][names[0]]["quantiles"]) if names else []:
        values = [[layer["quantiles"].get(q, math.nan) for layer in r["layers"].values()] for r in records]
        axes.flat[3].plot([r["step"] for r in records], [sum(v) / len(v) for v in values], marker=".", label=q)
    axes.flat[3].set(title="quantiles of |w| of kept weights, mean over layers", xlabel="step", yscale="log")
    if names:
        axes.flat[3].legend(fontsize="x-small")
    figure.savefig(path)
