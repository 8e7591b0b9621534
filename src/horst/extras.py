"""Optional packages, loaded on use: ``import horst`` needs torch alone, and a missing package names its extra."""

from __future__ import annotations

import importlib
from typing import Any

# The extra of pyproject.toml that brings a package.
EXTRA_OF = {
    "accelerate": "hf",
    "datasets": "text",
    "jax": "optax",
    "lightning": "lightning",
    "matplotlib": "lab",
    "numpy": "lab",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "optax": "optax",
    "peft": "peft",
    "pyarrow": "text",
    "rich": "lab",
    "safetensors": "lab",
    "scipy": "lab",
    "sklearn": "lab",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
    "tiktoken": "text",
    "timm": "lab",
    "torchvision": "vision",
    "transformers": "hf",
    "tyro": "lab",
    "wandb": "wandb",
}


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
            f'{package} is needed here and not installed. Install the extra: pip install "horst-optim[{extra}]"',
            name=error.name,
        ) from error
