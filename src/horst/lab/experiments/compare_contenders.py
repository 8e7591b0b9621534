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

# DeiT-small on one GPU, from given settings: the best of the table on digits beside AC/DC, which table1 runs. AdamW has
# the second beta and decay that were best for it with AC/DC.
VISION_GPU = (
    "adamw methods=set beta2=0.999 weight_decay=0.1",
    *(f"horst alpha=auto methods={method}" for method in ("set", "gmp", "rigl")),
)
