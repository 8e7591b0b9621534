"""Optional packages, loaded on use: ``import horst`` needs torch alone, and a missing package names its extra."""

from __future__ import annotations

import importlib
from typing import Any

_PACKAGES = {
    "hf": ("accelerate", "transformers"),
    "lab": ("matplotlib", "numpy", "rich", "safetensors", "scipy", "sklearn", "timm", "tyro"),
    "lightning": ("lightning",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "optax": ("jax", "optax"),
    "peft": ("peft",),
    "slurm": ("submitit",),
    "tensorboard": ("tensorboard",),
    "text": ("datasets", "pyarrow", "tiktoken"),
    "vision": ("torchvision",),
    "wandb": ("wandb",),
}
# The extra of pyproject.toml that brings a package.
EXTRA_OF = {package: extra for extra, packages in _PACKAGES.items() for package in packages}


def how_to_install(extra: str) -> str:
    """The command that installs an extra; horst is not on PyPI yet.

    Example:
        >>> how_to_install("hf")
        'from a checkout of horst: pip install ".[hf]"'
    """
    return f'from a checkout of horst: pip install ".[{extra}]"'


def load_extra(name: str) -> Any:
    """Import a module of an optional package, or say how to install it.

    Args:
        name: The module, such as ``"scipy.optimize"``; its package is in :data:`EXTRA_OF`.

    Example:
        >>> load_extra("numpy").zeros(2).sum()
        np.float64(0.0)
    """
    package = name.partition(".")[0]
    extra = EXTRA_OF[package]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but something it needs is not
        raise ModuleNotFoundError(
            f"{package} is needed here and not installed. Install the extra {how_to_install(extra)}",
            name=error.name,
        ) from error
