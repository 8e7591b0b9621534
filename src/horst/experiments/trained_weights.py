"""The weights that a run of ours trained, from its checkpoints."""

from __future__ import annotations

import os
import pathlib

from torch import Tensor

from horst.export.safetensors_header import parse_object
from horst.training import checkpoint

# Of a model that spred trained: a weight's two factors.
_FACTORS = (".parametrizations.weight.original0", ".parametrizations.weight.original1")


def find_checkpoint(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """``path`` itself if it is a checkpoint, else the newest of the run whose directory it is, if that kept any."""
    path = pathlib.Path(path)
    if path in checkpoint.complete(path.parent):
        return path
    return next(reversed(checkpoint.complete(path / "checkpoints")), None)


def trained_weights(step: pathlib.Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by name, on the CPU; the factors of spred are multiplied."""
    fingerprint = parse_object((step / "checkpoint.json").read_bytes(), f"{step}").get("fingerprint", {})
    weights: dict[str, Tensor] = checkpoint.load(step, fingerprint=fingerprint)["model"]
    first, second = _FACTORS
    for name in [name.removesuffix(first) for name in weights if name.endswith(first)]:
        weights[f"{name}.weight"] = weights.pop(name + first) * weights.pop(name + second)
    return weights
