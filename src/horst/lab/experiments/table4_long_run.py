"""Table 4: twice as long, 600 epochs of DeiT-small with AC/DC at 70 %."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from horst.lab.experiments import table1_deit_acdc
from horst.lab.experiments.result import command_line
from horst.lab.experiments.vision_model import VisionConfig

NAME = "table4_long_run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(table1_deit_acdc.Config):
    """Table 4: one seed, as the paper."""

    run: VisionConfig = VisionConfig(epochs=600)  # noqa: RUF009 - frozen
    sparsities: tuple[float, ...] = (0.7,)
    seeds: tuple[int, ...] = (0,)
    directory: pathlib.Path = pathlib.Path("runs/table4")


run = functools.partial(table1_deit_acdc.run, name=NAME)

if __name__ == "__main__":
    command_line(Config, run, f"{NAME}: 600 epochs at 70 %.")
