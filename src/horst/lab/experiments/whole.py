"""Models that FSDP2 has cut, put together again: pruning and counting need whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horst.lab.training.distributed import is_sharded


def whole_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or all parts of one that is cut over the ranks; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_model(model: Any, like: Any, device: torch.device) -> Any:
    """``model`` itself, or if it is cut, ``like`` with its weights."""
    if not is_sharded(model):
        return model
    like.to(device).load_state_dict({name: whole_tensor(tensor) for name, tensor in model.state_dict().items()})
    return like
