"""One rank of several runs on a CPU, started by torchrun, for test_distributed.py.

    torchrun --nproc-per-node 2 distributed_worker.py JOBS

JOBS is a JSON file: for each folder the options of a run, and where it begins (``from``: a folder and a step). Rank 0
leaves ``final.pt`` in each folder, and what a run raised instead in ``error.json``.
"""

import errno
import json
import os
import signal
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from distributed_runs import CONFIG, copy_run
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from toy_runs import ToyData, toy_run

from horst.training import Interrupted, LoopConfig, Task, accuracy, interruption, processes, train
from horst.training.distributed import on_every_rank, rank
from horst.training.metrics import MetricsLog


def signal_to_rank_1() -> None:
    """SIGTERM in the sixth step, at one rank only, whose steps take two seconds; the other's take no time."""
    seconds = [0.0]

    def batches(self, start):
        for step, batch in enumerate(original(self, start), start + 1):
            if rank() == 1:
                seconds[0] += 2.0
                if step == 6:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    original, ToyData.batches = ToyData.batches, batches
    interruption.time = types.SimpleNamespace(perf_counter=lambda: seconds[0])


def signal_to_rank_1_in_the_last_evaluation() -> None:
    evaluations = [0]

    def batches(self, start):
        if self.rows == 16 and rank() == 1:
            evaluations[0] += 1
            if evaluations[0] == 10:  # of the average after step 30; those before are after steps 7, 14, 21, 28
                os.kill(os.getpid(), signal.SIGTERM)
        yield from original(self, start)

    original, ToyData.batches = ToyData.batches, batches


def full_disk_at_rank_1() -> None:
    def create_stream(self, path, mode):
        if rank() == 1 and "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, path, mode)

    original, FileSystem.create_stream = FileSystem.create_stream, create_stream


def no_metrics_at_rank_0() -> None:
    def refuse(self, *args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    MetricsLog.__init__ = refuse


def no_tensorboard_at_rank_0() -> None:
    def refuse(self, *args, **options):
        raise ModuleNotFoundError("tensorboard is needed here and not installed")

    MetricsLog.__init__ = refuse


def run(folder: Path, options: dict) -> None:
    patch = options.pop("patch", None)
    if rank() == 0 and "from" in options:
        copy_run(Path(options["from"][0]), options["from"][1], folder)
    options.pop("from", None)
    dist.barrier()
    batches, create_stream, open_metrics = ToyData.batches, FileSystem.create_stream, MetricsLog.__init__
    if patch:
        globals()[patch]()
    try:
        weights, result = toy_run(folder, CONFIG, dropout=0.0, **options)
        if rank() == 0:
            torch.save({"weights": weights, "metrics": result.metrics}, folder / "final.pt")
    except (Interrupted, Exception) as error:
        folder.mkdir(exist_ok=True)
        message = {"type": type(error).__name__, "text": str(error)}
        (folder / f"error{rank()}.json").write_text(json.dumps(message))
    finally:
        ToyData.batches, FileSystem.create_stream, interruption.time = batches, create_stream, time
        MetricsLog.__init__ = open_metrics


def evaluate_in_parts(root: Path) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(20, 7), torch.randint(7, (20,))
    mine = [(logits[rank() :: 2], targets[rank() :: 2])]
    found, alone = accuracy(nn.Identity(), mine), None
    if rank() == 0:
        hits = logits.argmax(1) == targets
        alone = hits.double().mean().item()
        (root / "accuracy.json").write_text(json.dumps([found, alone]))


def train_with_losses_far_apart(root: Path) -> None:
    """Two steps, and the second of them resumed. In float32 the sum of both first losses loses that of rank 1."""
    losses = [[2.0**24, 0.0], [1.0, 1.0]][rank()]

    class Losses:
        def batches(self, start):
            return ((torch.ones(1, 1), torch.tensor([loss])) for loss in losses[start:])

    for name in ("far-apart", "far-apart-resumed"):
        if rank() == 0 and name == "far-apart-resumed":
            copy_run(root / "far-apart", 1, root / name)
        dist.barrier()
        model = nn.Linear(1, 1)
        task = Task(
            model=model,
            loss=lambda model, inputs, targets: 0.0 * model(inputs).sum() + targets.sum(),
            train=Losses(),
            evaluate=lambda model: {},
        )
        config = LoopConfig(precision="float32", compile="off", log_every=2, checkpoint_every=1)
        train(task, torch.optim.SGD(model.parameters(), lr=0.1), config, steps=2, directory=root / name)


def main() -> None:
    torch.set_num_threads(1)
    jobs = Path(sys.argv[1])
    with processes("cpu") as world:
        assert (world.rank, world.size) == (int(os.environ["RANK"]), 2)
        for folder, options in json.loads(jobs.read_text()).items():
            run(Path(folder), options)
        assert len(set(on_every_rank(torch.initial_seed))) == 2  # ranks drop out different units
        evaluate_in_parts(jobs.parent)
        train_with_losses_far_apart(jobs.parent)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then


if __name__ == "__main__":
    main()
