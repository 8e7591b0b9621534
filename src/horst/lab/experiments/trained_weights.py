"""The weights that a run of ours trained, from its checkpoints."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from torch import Tensor

from horst.files import read_json
from horst.lab.training import checkpoint

# Of a model that spred trained: a weight's two factors.
_FACTORS = (".parametrizations.weight.original0", ".parametrizations.weight.original1")


def find_checkpoint(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """``path`` itself if it is a checkpoint, else that of the last step of the run whose directory it is; none if no
    checkpoint was kept.

    Raises:
        ValueError: The run's checkpoints are all of earlier steps.
    """
    path = pathlib.Path(path)
    if path in checkpoint.complete(path.parent):
        return path
    newest = next(reversed(checkpoint.complete(path / "checkpoints")), None)
    if newest is not None:
        index = _index(newest)
        steps = index.get("fingerprint", {}).get("config", {}).get("steps")
        if index.get("step") != steps:
            raise ValueError(
                f"the newest checkpoint of {path} is of step {index.get('step')} of {steps}: the run was interrupted "
                "there, or broke down later. Run its recipe again with --checkpoint-every, into another --directory."
            )
    return newest


def trained_weights(step: pathlib.Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by name, on the CPU; the factors of spred are multiplied."""
    weights: dict[str, Tensor] = checkpoint.load(step, fingerprint=_index(step).get("fingerprint", {}))["model"]
    first, second = _FACTORS
    for name in [name.removesuffix(first) for name in weights if name.endswith(first)]:
        weights[f"{name}.weight"] = weights.pop(name + first) * weights.pop(name + second)
    return weights


def _index(step: pathlib.Path) -> dict[str, Any]:
    return read_json(step / "checkpoint.json")
