"""HORST and HAM in timm's optimizer registry, under the names "horst" and "ham"; importing this module puts them there.

    import horst.integrations.timm
    optimizer = timm.optim.create_optimizer_v2(model, "horst", lr=1e-3, weight_decay=0.1, alpha=5.0)

timm's training script is not part of its package and imports nothing of ours, so it is started through this module:

    python -m horst.integrations.timm train.py --opt horst --opt-kwargs alpha=5 ...
    torchrun --nproc-per-node 8 -m horst.integrations.timm train.py --opt horst ...

timm makes the parameter groups: no decay on tensors of one dimension and on those the model names in
``no_weight_decay()``, and with ``layer_decay`` a smaller learning rate for earlier layers. The mirror step and ``l1``
are for tensors of two or more dimensions, in every group; the strength ``alpha * lr`` falls with the layer's rate.
For another choice, pass ``param_group_fn=functools.partial(horst.param_groups, weight_decay=0.1, ...)``: in a group
that brings its own ``alpha``, "horst" takes the mirror step on every tensor.
"""

from __future__ import annotations

import pathlib
import runpy
import sys

from horst.extras import how_to_install
from horst.integrations.matrices import MatrixHORST
from horst.optimizers.ham import HAM

try:
    from timm.optim._optim_factory import OptimInfo, default_registry
except ImportError as error:
    raise ImportError(
        f"horst.integrations.timm needs timm 1.0.12 or newer ({error}); {how_to_install('vision')}"
    ) from error

__all__: list[str] = []

default_registry.register(
    OptimInfo(
        name="horst",
        opt_class=MatrixHORST,
        description="AdamW, then an entropy-mirror step along the same direction: weights that survive pruning",
        has_betas=True,
    )
)
default_registry.register(
    OptimInfo(
        name="ham", opt_class=HAM, description="AdamW, then an entropy-mirror step along the gradient", has_betas=True
    )
)


def _run_script(arguments: list[str]) -> None:
    """Run a training script as Python would have, had it been started itself."""
    if not arguments or not pathlib.Path(arguments[0]).is_file():
        given = f"{arguments[0]} is not a file. " if arguments else ""
        sys.exit(f"{given}Usage: python -m horst.integrations.timm train.py --opt horst [--opt-kwargs alpha=5] ...")
    sys.argv, sys.path[0] = arguments, str(pathlib.Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _run_script(sys.argv[1:])
