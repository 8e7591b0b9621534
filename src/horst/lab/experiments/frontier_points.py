"""The points of the frontier studies: which contenders run with which settings.

A point is a contender and its settings; several values of a setting are a grid. What a point does not name is that of
the study's ``run``, ``seeds`` and ``methods``.
"""

from __future__ import annotations

# Four blocks of width 64 after 800 steps, with the settings that the guides recommend.
LANGUAGE = (
    # how much can be pruned, over a factor of 32 in the learning rate
    "adamw lr=2e-3,4e-3,8e-3 methods=all",
    "horst lr=2e-3,8e-3 alpha=5,auto methods=all",
    "adamw-l1 lr=8e-3 l1=0.04,0.08 mirror=blocks methods=all",
    "adamw-l1 lr=4e-3 l1=0.04 mirror=blocks methods=all",
    "horst-l1 lr=8e-3 l1=0.04,0.08 alpha=auto methods=all",
    "horst-l1 lr=2e-3 l1=0.04 alpha=auto methods=all",
    # Whose gain: AdamW with a larger learning rate for the norms, or with auto's bound on the learning rate; then
    # auto's numbers on the norms alone, on all but the norms, on the blocks' matrices, on embeddings and positions.
    "adamw lr=2e-3 norm_lr_ratio=24 methods=all",
    "adamw lr=4e-3,8e-3 norm_lr_ratio=6 methods=all",
    "horst lr=8e-3 alpha=0 max_step=0.00164 methods=all",
    "horst lr=8e-3 alpha=27.3 max_step=0.00164 no_mirror=matrix+embedding+position methods=all",
    "horst lr=8e-3 alpha=27.3 max_step=0.00164 no_mirror=norm methods=all",
    "horst lr=8e-3 alpha=27.3 max_step=0.00164 no_mirror=norm+embedding+position methods=all",
    "horst lr=8e-3 alpha=27.3 max_step=0.00164 no_mirror=norm+matrix methods=all",
    "adamw-l1 lr=8e-3 l1=0.04 norm_lr_ratio=6 mirror=blocks methods=all",
    "horst-l1 lr=8e-3 l1=0.04 alpha=0 max_step=0.00164 methods=all",
    "horst-l1 lr=8e-3 l1=0.04 alpha=27.3 max_step=0.00164 no_mirror=matrix+embedding+position methods=all",
    "horst-l1 lr=8e-3 l1=0.04 alpha=27.3 max_step=0.00164 no_mirror=norm methods=all",
    "adamw lr=5e-4,1.6e-2 methods=all",
    "horst lr=5e-4,1.6e-2 alpha=auto methods=all",
    # the other second beta
    "adamw beta2=0.999 lr=4e-3,8e-3 methods=all",
    "horst beta2=0.999 lr=8e-3 alpha=auto methods=all",
    "horst-l1 beta2=0.999 lr=8e-3 l1=0.04 alpha=auto methods=all",
    # four times as long, with half the l1
    "adamw steps=3200 lr=2e-3,4e-3,8e-3 methods=all",
    "horst steps=3200 lr=2e-3,8e-3 alpha=auto methods=all",
    "adamw-l1 steps=3200 lr=4e-3,8e-3 l1=0.02 mirror=blocks methods=all",
    "horst-l1 steps=3200 lr=2e-3,8e-3 l1=0.02 alpha=auto methods=all",
    # the rate alpha * lr, of which auto's is 0.045
    "horst lr=2e-3 alpha_lr=0.02,0.1,0.2",
)
VISION = (
    "adamw lr=1e-3,3e-3,1e-2,3e-2 sparsity=0.9,0",
    "horst lr=1e-3,3e-3,1e-2,3e-2 alpha=auto sparsity=0.9,0",
    "horst lr=1e-3,3e-3,1e-2,3e-2 alpha=5",
    "horst lr=3e-3 alpha_lr=0.005,0.02,0.1",
)
VISION_GPU = ("adamw sparsity=0.9,0", "horst alpha=5", "horst alpha=auto sparsity=0.9,0")
