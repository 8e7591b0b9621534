"""Who takes part in the comparisons, and the six tries of each: its two most important settings, on a grid.

A line is a point of :mod:`~horst.lab.experiments.frontier`. What it does not name is that of the comparison's ``run``.
"""

from __future__ import annotations

# The first is the one that costs are relative to.
LANGUAGE = (
    "adamw lr=2e-3,4e-3,8e-3 weight_decay=0.1,0.5",
    "adamw-l1 lr=4e-3,8e-3 l1=0.02,0.05,0.1",
    "adamw-penalty lr=4e-3,8e-3 penalty=1e-5,3e-5,1e-4",
    "ham lr=4e-3,8e-3 ham_alpha=50,200,800",
    "horst lr=4e-3,8e-3 alpha=5,20,auto",
    "horst-l1 lr=4e-3,8e-3 l1=0.02,0.05,0.1 alpha=auto",
    "hyperbolic lr=4e-3,8e-3 alpha=5,10,20",
    "muon lr=4e-3,8e-3 muon_lr_ratio=0.5,1,2",
    "horst-muon lr=4e-3,8e-3 alpha=5,10,auto",
    "spred lr=4e-3,8e-3 spred_decay=0.1,0.5,2",
)
# With sparsity=0 a model is trained dense and pruned once at the end, by magnitude.
VISION = (
    "adamw lr=3e-3,1e-2,3e-2 weight_decay=0.1,0.5 sparsity=0",
    "adamw lr=3e-3,1e-2,3e-2 weight_decay=0.1,0.5 methods=acdc",
    "horst lr=3e-3,1e-2,3e-2 alpha=5,auto methods=acdc",
    "adamw lr=3e-3,1e-2,3e-2 weight_decay=0.1,0.5 methods=gmp",
    "horst lr=3e-3,1e-2,3e-2 alpha=5,auto methods=gmp",
    "adamw lr=3e-3,1e-2,3e-2 weight_decay=0.1,0.5 methods=rigl",
    "horst lr=3e-3,1e-2,3e-2 alpha=5,auto methods=rigl",
    "horst lr=3e-3,1e-2,3e-2 alpha=5,auto sparsity=0",
    "adamw-l1 lr=3e-3,1e-2 l1=0.02,0.05,0.1 sparsity=0",
    "horst-l1 lr=3e-3,1e-2 l1=0.02,0.05,0.1 alpha=auto sparsity=0",
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
