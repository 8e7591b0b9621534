"""Table 3: HAM beside AdamW and HORST, DeiT-small with AC/DC at 90 %."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from horst.lab.baselines.contenders import Name
from horst.lab.experiments import table1_deit_acdc
from horst.lab.experiments.result import command_line

NAME = "table3_ham"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(table1_deit_acdc.Config):
    """Table 3: the runs of Table 1 at 90 %, with HAM at three betas. The paper reports seed 1 and HAM's best."""

    optimizers: tuple[Name, ...] = ("adamw", "ham", "horst")
    sparsities: tuple[float, ...] = (0.9,)
    ham_betas: tuple[float, ...] = (0.0, 1e-3, 1e-2)
    seeds: tuple[int, ...] = (1,)
    directory: pathlib.Path = pathlib.Path("runs/table1")  # the runs that Table 1 has are not made again


run = functools.partial(table1_deit_acdc.run, name=NAME)

if __name__ == "__main__":
    command_line(Config, run, f"{NAME}: HAM beside AdamW and HORST.")
