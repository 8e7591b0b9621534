"""Runs that are killed with SIGKILL and resumed until they are done, for test_resume.py.

    python kill_worker.py FOLDER SEED...

Each attempt is a fork of this process, which has torch loaded and has computed nothing. It kills itself: after a
number of executed lines drawn at random, in the loop or in the code that writes checkpoints, or at a moment of choice.
FOLDER gets a folder for each case, with ``final.pt``, and ``report.json``. SEEDs draw the random numbers.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo  # by torch's optimizers; all three here and not in every fork, since they take seconds
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem
from toy_runs import toy_run

from horst.training.metrics import MetricsLog

TRACED = ("horst/training/", "torch/distributed/checkpoint/filesystem.py", "/shutil.py")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_lines(count: int):
    """Die when so many lines of the traced files have been executed; returns the number executed so far."""
    executed = [0]

    def on_line(frame, event, argument):
        if event == "line":
            executed[0] += 1
            if executed[0] == count:
                die()
        return on_line

    def on_call(frame, event, argument):
        return on_line if any(part in frame.f_code.co_filename for part in TRACED) else None

    sys.settrace(on_call)
    return executed


def on_call_number(owner, name: str, number: int, *, before=None, after=None) -> None:
    """Replace a function so that its call of that number dies before or after its work."""
    original, calls = getattr(owner, name), [0]

    def replacement(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number and before is not None:
            before(*args, **kwargs)
            die()
        result = original(*args, **kwargs)
        if calls[0] == number and after is not None:
            die()
        return result

    setattr(owner, name, replacement)


def half_a_data_file() -> None:
    create, files = FileSystem.create_stream, [0]

    class Stream:
        def __init__(self, inner):
            self.inner, self.left = inner, 2000

        def write(self, data):
            if len(data) > self.left:
                self.inner.write(data[: self.left])
                self.inner.flush()
                die()
            self.left -= len(data)
            return self.inner.write(data)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    @contextlib.contextmanager
    def limited(self, path, mode):
        files[0] += 1
        with create(self, path, mode) as inner:
            yield Stream(inner) if files[0] == 3 else inner  # the second checkpoint's data

    FileSystem.create_stream = limited


def half_a_line(log: MetricsLog, step: int, numbers: dict) -> None:
    log._file.write('{"step": 1')
    log._file.flush()


def half_deleted(path, **options) -> None:
    next(Path(path).iterdir()).unlink()


MOMENTS = {
    "half a data file": half_a_data_file,
    "before the files are flushed": lambda: on_call_number(os, "fsync", 8, before=lambda *a: None),
    "before the rename": lambda: on_call_number(os, "rename", 3, before=lambda *a: None),  # torch renames one, too
    "after the rename": lambda: on_call_number(os, "rename", 4, after=True),
    "while old ones are deleted": lambda: on_call_number(shutil, "rmtree", 1, before=half_deleted),
    "half a line of metrics": lambda: on_call_number(MetricsLog, "write", 9, before=half_a_line),
}


def attempt(folder: Path, plan=None) -> bool:
    """One process; whether it came to the end."""
    process = os.fork()
    if process == 0:
        if plan is not None:
            plan()
        weights, _ = toy_run(folder)
        sys.settrace(None)
        torch.save(weights, folder / "final.pt")
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def lines_of_a_run(folder: Path) -> int:
    process = os.fork()
    if process == 0:
        executed = after_lines(-1)
        toy_run(folder)
        sys.settrace(None)
        (folder / "lines").write_text(str(executed[0]))
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    return int((folder / "lines").read_text())


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    report = {}
    assert attempt(root / "uninterrupted")
    for number, (name, plan) in enumerate(MOMENTS.items()):
        killed = not attempt(root / f"moment{number}", plan)
        assert attempt(root / f"moment{number}")
        report[f"moment{number}"] = {"name": name, "kills": int(killed)}
    lines = lines_of_a_run(root / "counted")
    for seed in sys.argv[2:]:
        chance, kills = random.Random(seed), 0
        while True:
            limit = lines // 4 if kills < 3 else 2 * lines // 3  # so that no run is over before its third kill
            if attempt(root / f"random{seed}", functools.partial(after_lines, chance.randrange(1, limit))):
                break
            kills += 1
        report[f"random{seed}"] = {"name": "random", "kills": kills}
    (root / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
