"""torchtitan (0.3): HORST as a name in its optimizer config. In a model's config: ``optimizer=horst(lr=1e-3)``."""

from dataclasses import dataclass

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from horst import HORST


class HorstContainer(OptimizersContainer):
    """torchtitan's container, which knows one name more."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # noqa: D106 - of its own, so that build() makes this container
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        return HORST if name == "HORST" else OptimizersContainer._resolve_optimizer_factory(name)


def horst(lr, alpha=5.0, weight_decay=0.1, vectors=r"(norm\w*\.weight|bias)$", implementation="foreach"):
    """The config: decay and mirror step for all but the vectors. "fused" is one kernel per group on a GPU."""
    common, none = {"lr": lr, "betas": (0.9, 0.999)}, {"alpha": 0.0, "weight_decay": 0.0}
    groups = {vectors: common | none, ".*": common | {"alpha": alpha, "weight_decay": weight_decay}}
    return HorstContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name="HORST", optimizer_kwargs=options)
            for pattern, options in groups.items()
        ],
        implementation=implementation,
    )


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    container = horst(lr=1e-3).build(model_parts=[model])
    print([type(one).__name__ for one in container], [group["alpha"] for group in container.optimizers[0].param_groups])
