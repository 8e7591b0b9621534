"""The soak: kills, command lines and damaged files by the thousand.

    python tests/soak/run.py --kills 1000 --command-lines 10000 --files 10000

Writes benchmarks/results/soak.json, as every experiment writes its result, and exits with 1 if anything was wrong.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from horst.lab.experiments.result import run_and_record

HERE = Path(__file__).parent
PARTS = {"kills": "kills.py", "command_lines": "command_lines.py", "files": "damaged_files.py"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Counts of the soak.

    Args:
        kills: SIGKILLs, over runs on one and on two processes.
        command_lines: Command lines of random words.
        files: Damaged files.
        seed: First seed; each worker has its own.
        workers: Processes that share each part.
    """

    kills: int
    command_lines: int
    files: int
    seed: int
    workers: int


def run_part(config: Config, name: str, folder: Path, failures: list) -> list[dict]:
    """One part by all workers; its rows, summed over them."""
    start, count = time.monotonic(), getattr(config, name)
    started = []
    for worker in range(config.workers if count else 0):
        share = count // config.workers + (worker < count % config.workers)
        place = folder / f"{name}{worker}"
        command = [sys.executable, str(HERE / PARTS[name]), str(place), str(share), str(config.seed + worker)]
        started.append((place, subprocess.Popen(command)))
    rows: dict[str, dict] = {}
    for place, process in started:
        if process.wait() != 0:
            raise SystemExit(f"{PARTS[name]} ended with exit code {process.returncode}; see above.")
        report = json.loads((place / "report.json").read_text())
        failures += report["failures"]
        for row in report["rows"]:
            known = rows.setdefault(row["part"], dict.fromkeys(row, 0) | {"part": row["part"]})
            for key in row.keys() - {"part"}:
                known[key] += row[key]
    seconds = round(time.monotonic() - start, 1)
    for row in rows.values():
        row["seconds_of_the_part"] = seconds
        print(json.dumps(row), flush=True)
    return list(rows.values())


def body(config: Config) -> tuple[list, dict, list]:
    failures: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        rows = [row for name in PARTS for row in run_part(config, name, Path(folder), failures)]
    notes = [
        "Kills: SIGKILL at a random moment of a run on one or two CPU processes (DDP and FSDP2), which is then "
        "resumed, from a checkpoint if there was one by then. An interruption of two processes may be two kills. "
        "Lost: it does not end. Different: other bytes of the weights, or other metrics, than without kills.",
        "Command lines and damaged files: each in a process of its own. A hang takes more than 10 s. Others: another "
        "exit code, several lines, something left behind, another value read.",
    ]
    return rows, {"failures": failures}, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, count in (("kills", 1_000), ("command-lines", 10_000), ("files", 10_000), ("seed", 0), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "benchmarks" / "results" / "soak.json")
    options = vars(parser.parse_args())
    out = options.pop("out")
    config = Config(**options)
    result = run_and_record("soak", config, functools.partial(body, config))
    failures = result.curves["failures"]
    for failure in failures:
        print(json.dumps(failure), file=sys.stderr)
    print(f"{len(failures)} failures -> {result.save(out)}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
