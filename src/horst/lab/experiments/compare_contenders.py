"""Who takes part in the comparisons, and the six tries of each: its two most important settings, on a grid.

A line is a point of :mod:`~horst.lab.experiments.frontier`. What it does not name is that of the comparison's ``run``.
Optimizers and their grids are those of :mod:`~horst.lab.baselines.tuning`.
"""

from __future__ import annotations

from horst.lab.baselines.contenders import Name
from horst.lab.baselines.tuning import CONTENDERS, Grid

_NEEDS_MORE = ("pat",)  # a package that is not in any extra


def _line(name: Name, grid: Grid, more: str = "") -> str:
    """A contender with its grid in words.

    Example:
        >>> _line("horst", {"lr": (0.002, 0.004), "alpha": (5.0, "auto")}, "methods=acdc")
        'horst lr=0.002,0.004 alpha=5.0,auto methods=acdc'
    """
    settings = [f"{setting}={','.join(map(str, values))}" for setting, values in grid.items()]
    return " ".join([name, *settings, *([more] if more else [])])


# The first is the one that costs are relative to.
LANGUAGE = tuple(_line(name, found.language) for name, found in CONTENDERS.items() if name not in _NEEDS_MORE)

# Trained dense (sparsity=0), pruned once at the end by magnitude; some go to the target by themselves.
_ONE_SHOT: dict[Name, str] = {
    **dict.fromkeys(("adamw", "horst", "adamw-l1", "horst-l1", "muon", "horst-muon"), "sparsity=0"),
    **dict.fromkeys(("spred", "dwf", "pilot", "madam"), "sparsity=0"),
    **dict.fromkeys(("linbreg", "adabreg", "cast"), "sparsity=0 target_sparsity=0.9"),
}
# Masks while training, under these optimizers.
_MASKS: dict[str, tuple[Name, ...]] = {
    **dict.fromkeys(("acdc", "gmp", "rigl", "set", "lrr", "random"), ("adamw", "horst")),
    **dict.fromkeys(("svite", "safe", "sparse_pretraining"), ("adamw",)),
}
VISION = (
    *(_line(name, CONTENDERS[name].vision, more) for name, more in _ONE_SHOT.items()),
    *(_line(name, CONTENDERS[name].vision, f"methods={m}") for m, names in _MASKS.items() for name in names),
    _line("sign-in", CONTENDERS["sign-in"].vision, "methods=random"),
)

# On one GPU, from given settings.
LANGUAGE_GPU = (
    "adamw weight_decay=0.1",
    "adamw-l1 l1=0.01",
    "horst alpha=5",
    "horst-l1 alpha=5 l1=0.01",
    "muon muon_lr_ratio=1",
    "horst-muon alpha=5",
)
VISION_GPU = (
    "adamw sparsity=0",
    "adamw methods=acdc",
    "horst alpha=auto methods=acdc",
    "adamw methods=gmp",
    "horst alpha=auto methods=gmp",
    "adamw methods=rigl",
)
