"""The points of the frontier studies: which contenders run with which settings.

A point is a contender and its settings; several values of a setting are a grid. What a point does not name is that of
the study's ``run``, ``seeds`` and ``methods``.
"""

from __future__ import annotations

# AdamW's learning rate and weight decay are tuned at every width and length at which HORST is run.
LANGUAGE = (
    "adamw steps=1600 lr=5e-4,2e-3,4e-3,8e-3,1.6e-2 weight_decay=0.1,0.3,1",
    "horst steps=1600 lr=5e-4,2e-3,8e-3 alpha=5,auto seeds=0,1,2,3",
    "horst steps=1600 lr=5e-4,2e-3,8e-3 alpha_lr=0.02,0.1",
    "adamw-l1 steps=1600 lr=2e-3,8e-3 l1=0.02,0.05,0.1",
    "horst-l1 steps=1600 lr=2e-3,8e-3 l1=0.02,0.05,0.1 alpha=auto",
    "adamw width=128 lr=5e-4,2e-3,4e-3,8e-3 weight_decay=0.1,0.3,1",
    "horst width=128 lr=5e-4,2e-3,8e-3 alpha=5,auto seeds=0,1,2,3",
    "horst width=128 lr=5e-4,2e-3,8e-3 alpha_lr=0.02,0.1",
    "adamw lr=5e-4,2e-3,4e-3,8e-3,1.6e-2 weight_decay=0,0.01,0.1,0.3,1",
    "horst lr=5e-4,2e-3,8e-3,1.6e-2 alpha=5,auto seeds=0,1,2,3",
    "horst lr=5e-4,2e-3,8e-3,1.6e-2 alpha_lr=0.005,0.02,0.05,0.1,0.2",
)
# The paper's open questions: spectral descent under the mirror step, and other ways to prune.
COMPOSITIONS = (
    "adamw lr=2e-3,8e-3 methods=all",
    "horst lr=2e-3,8e-3 alpha=5,auto methods=all",
    "horst lr=2e-3,8e-3 alpha_lr=0.05 methods=all",
    "horst lr=2e-3,8e-3 alpha_lr=0.02,0.1",
    "horst-muon lr=2e-3,8e-3 alpha_lr=0.02,0.05,0.1",
    "horst-muon lr=2e-3,8e-3 alpha=auto",
    "hyperbolic lr=2e-3,8e-3 alpha_lr=0.02,0.05,0.1",
    "muon lr=2e-3,8e-3 muon_lr_ratio=0.5,1,2",
    "adamw-penalty lr=2e-3,8e-3 penalty=1e-5,3e-5,1e-4",
    "adamw-l1 lr=2e-3,8e-3 l1=0.02,0.1,0.3",
    "spred lr=2e-3,8e-3 spred_decay=0.1,0.5,2",
    "horst-l1 lr=2e-3,8e-3 alpha=auto l1=0.02,0.1,0.3",
    # The head is tied to the embedding, so "blocks" is all matrices without embeddings; the last has these alone.
    "horst lr=2e-3,8e-3 alpha_lr=0.05 mirror=blocks,all",
    "horst lr=2e-3,8e-3 alpha_lr=0.05 no_mirror=matrix",
)
VISION = (
    "adamw width=64 lr=3e-3,1e-2 sparsity=0.9,0",
    "horst width=64 lr=3e-3,1e-2 alpha=auto sparsity=0.9,0",
    "horst width=64 lr=3e-3,1e-2 alpha=5",
    "horst width=64 lr=3e-3,1e-2 alpha_lr=0.05,0.1",
    "adamw lr=1e-3,3e-3,1e-2,3e-2 weight_decay=0,0.1,0.5 sparsity=0.9,0",
    "horst lr=1e-3,3e-3,1e-2,3e-2 alpha=auto sparsity=0.9,0",
    "horst lr=1e-3,3e-3,1e-2,3e-2 alpha=5",
    "horst lr=1e-3,3e-3,1e-2,3e-2 alpha_lr=0.02,0.05,0.1",
    "adamw lr=1e-2 methods=gmp,rigl",
    "horst lr=1e-2 alpha=5,auto methods=gmp,rigl",
)
VISION_GPU = ("adamw sparsity=0.9,0", "horst alpha=5", "horst alpha=auto sparsity=0.9,0")
