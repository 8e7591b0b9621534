"""The packages of the extra "lab" (scipy, matplotlib, tyro), loaded on use: ``import horst`` needs torch alone."""

from __future__ import annotations

import importlib
from typing import Any


def load_lab_module(name: str) -> Any:
    """Import a module of the extra "lab", or say how to install it.

    Args:
        name: The module, such as ``"scipy.optimize"``.

    Example:
        >>> load_lab_module("math").pi > 3
        True
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but something it needs is not
        raise ModuleNotFoundError(
            f'{package} is needed here and not installed. Install the extra: pip install "horst-optim[lab]"',
            name=error.name,
        ) from error
