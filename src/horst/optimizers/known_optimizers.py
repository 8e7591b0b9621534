"""What is known about torch's own optimizers: how they decay weights, and how far a step moves one."""

from __future__ import annotations

from typing import Any

from torch import optim
from torch.optim import Optimizer

__all__ = ["decays_apart", "refuse_auto"]

# Those that shrink the weight by lr * weight_decay apart from the gradient, and those that add weight_decay * weight to
# the gradient. Adam, NAdam and RAdam carry a flag in their groups instead.
_DECOUPLED = (optim.AdamW, optim.Muon, optim.Adafactor)
_COUPLED = (optim.SGD, optim.ASGD, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.RMSprop)
# Those whose step is about lr in each weight; Muon's only with the option that makes it so.
_STEPS_OF_ABOUT_LR = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Muon)


def decays_apart(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the ``weight_decay`` of a group is decoupled, as in AdamW; an error where that is not known."""
    if (decoupled := group.get("decoupled_weight_decay")) is not None:
        return bool(decoupled)
    if not isinstance(optimizer, _DECOUPLED + _COUPLED):
        raise ValueError(
            f"{type(optimizer).__name__} has weight_decay={group['weight_decay']}, and it is not known whether it is "
            "applied to the weights (decoupled_decay=True, as in AdamW) or added to the gradient "
            "(decoupled_decay=False, as in SGD). Give decoupled_decay."
        )
    return isinstance(optimizer, _DECOUPLED)


def refuse_auto(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """An error if a step of the optimizer does not move each weight by about lr, which ``alpha="auto"`` relies on."""
    needs = "alpha='auto' is for optimizers that move a weight by about lr, as Adam does"
    if not isinstance(optimizer, _STEPS_OF_ABOUT_LR):
        raise ValueError(f"{needs}, and {type(optimizer).__name__} is not known to. Give alpha as a number.")
    if isinstance(optimizer, optim.Muon) and group["adjust_lr_fn"] != "match_rms_adamw":
        raise ValueError(
            f"{needs}, and Muon with adjust_lr_fn={group['adjust_lr_fn']!r} moves it by about lr over the square root "
            "of the matrix's width. Use Muon(..., adjust_lr_fn='match_rms_adamw') with a learning rate like AdamW's, "
            "or give alpha as a number."
        )
