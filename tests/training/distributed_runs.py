"""What test_distributed.py and its worker share."""

import dataclasses
import shutil
from pathlib import Path

import toy_runs

CONFIG = dataclasses.replace(toy_runs.CONFIG, keep_checkpoints=9, accumulate=2)


def copy_run(source: Path, step: int, target: Path) -> None:
    """A run as it would be if it had ended after ``step``; its metrics are longer, as after a kill."""
    shutil.copytree(source, target)
    for left in (target / "final.pt", *target.glob("error*.json")):
        left.unlink(missing_ok=True)
    for path in (target / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
