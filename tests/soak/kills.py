"""Runs on one and on two processes, killed with SIGKILL at random moments and resumed until they are done.

    python kills.py FOLDER COUNT SEED

The moment is drawn by the clock, from the length of a whole run, so it falls anywhere: start-up, step, evaluation,
half a checkpoint. Of two processes one dies first and the other up to 0.3 s later, or is left to notice. Then the run
is started again. At the end its weights must have the bytes, and its metrics the lines, of an uninterrupted run.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import socket
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))

import forks
import torch
import torch._dynamo  # by torch's optimizers; all of these here and not in every fork, since they take seconds
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.device_mesh
import torch.distributed.fsdp
from toy_runs import read_metrics, toy_run

from horst.training import processes

COUNTED = ("kills", "runs", "interruptions", "with_a_checkpoint", "lost", "different")
LOST = 120.0  # seconds after which a resumed run that does not end counts as lost
KINDS = [
    {"size": 1, "method": "acdc"},
    {"size": 2, "method": "acdc", "kind": "ddp"},
    {"size": 1, "method": "rigl", "optimizer": "adamw"},
    {"size": 2, "method": "acdc", "kind": "fsdp"},
    {"size": 1, "method": "srste"},
    {"size": 2, "method": None, "kind": "fsdp", "optimizer": "adamw", "text": True},
    {"size": 1, "method": "imp"},
    {"size": 2, "method": "rigl", "kind": "ddp"},
]


def digest(weights: dict) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def one_rank(folder: Path, rank: int, size: int, port: int, options: dict) -> int:
    """What a forked process does: the whole run, or the rest of it."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    with processes("cpu"):
        weights, _ = toy_run(folder, **options)
        if rank == 0:
            (folder / "digest").write_text(digest(weights))
        if size > 1:
            torch.distributed.barrier()
        os._exit(0)  # gloo's threads abort the interpreter's own exit now and then


def begin(folder: Path, kind: dict) -> list[int]:
    options = {name: value for name, value in kind.items() if name != "size"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder.with_name(f"{folder.name}-log{rank}") for rank in range(kind["size"])]
    for log in logs:
        log.mkdir(parents=True, exist_ok=True)
    return [
        forks.start(lambda rank=rank: one_rank(folder, rank, kind["size"], port, options), logs[rank])
        for rank in range(kind["size"])
    ]


def finish(folder: Path, kind: dict) -> str:
    """Start it and wait for its end; what went wrong, if anything did."""
    ranks = begin(folder, kind)
    end = time.monotonic() + LOST
    codes = [forks.wait(process, max(0.0, end - time.monotonic())) for process in ranks]
    for process, code in zip(ranks, codes, strict=True):
        if code is None:
            forks.kill(process)
    if any(codes) or None in codes:
        errors = [folder.with_name(f"{folder.name}-log{rank}") / "err" for rank in range(kind["size"])]
        return f"ended with {codes}: " + " | ".join(error.read_text()[-600:] for error in errors)
    return ""


def interrupt(folder: Path, kind: dict, seconds: float, chance: random.Random) -> tuple[int, bool]:
    """Start it and kill its processes; how many were alive to be killed, and whether it came to its end before."""
    ranks = begin(folder, kind)
    time.sleep(chance.uniform(0.0, seconds))
    chance.shuffle(ranks)
    killed = 0
    for process in ranks:
        killed += forks.kill(process) == -9
        if process != ranks[-1]:
            time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.3)]))
    return killed, (folder / "digest").exists()


def different(folder: Path, expected: str, metrics: list) -> str:
    """What a run that ended has otherwise than the uninterrupted one, if anything."""
    found = []
    if (folder / "digest").read_text() != expected:
        found.append("other bytes of the weights")
    lines = read_metrics(folder)
    if lines != metrics:
        line, right = next(pair for pair in itertools.zip_longest(lines, metrics) if pair[0] != pair[1])
        found.append(f"other metrics, first {line} instead of {right}")
    return "; ".join(found)


def main() -> None:
    torch.set_num_threads(1)
    root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    whole: dict[int, tuple[str, list, float]] = {}
    report = {f"{size}": dict.fromkeys(COUNTED, 0) for size in (1, 2)}
    failures = []
    for number in itertools.count():
        if sum(entry["kills"] for entry in report.values()) >= count:
            break
        place = number % len(KINDS)
        kind = KINDS[place]
        if place not in whole:
            start = time.monotonic()
            wrong = finish(root / f"whole{place}", kind)
            assert not wrong, wrong
            folder = root / f"whole{place}"
            whole[place] = (folder / "digest").read_text(), read_metrics(folder), time.monotonic() - start
        expected, metrics, seconds = whole[place]
        entry, folder = report[f"{kind['size']}"], root / f"run{number}"
        entry["runs"] += 1
        for _ in range(chance.randint(3, 9)):
            killed, ended = interrupt(folder, kind, seconds, chance)
            entry["kills"] += killed
            entry["interruptions"] += bool(killed)
            if killed and any((folder / "checkpoints").glob("step-*/checkpoint.json")):
                entry["with_a_checkpoint"] += 1  # the others start anew
            if ended:
                break
        wrong = finish(folder, kind)  # of a run that had ended, it must give the same once more
        if wrong:
            entry["lost"] += 1
        elif wrong := different(folder, expected, metrics):
            entry["different"] += 1
        if wrong:
            failures.append({"part": "kills", "seed": seed, "run": number, "kind": kind, "what": wrong})
        else:
            shutil.rmtree(folder)
            for log in root.glob(f"run{number}-log*"):
                shutil.rmtree(log)
    rows = [{"part": f"kills, {size} process{'es' * (size != '1')}", **entry} for size, entry in report.items()]
    (root / "report.json").write_text(json.dumps({"rows": rows, "failures": failures}))


if __name__ == "__main__":
    main()
