"""The precision of what runs from block to block under autocast."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Residual = Literal["float32", "autocast"]


class AutocastPrecision(nn.Module):
    """Casts to autocast's dtype where autocast is on, and changes nothing elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``, in the precision that the layers around it compute in."""
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
