"""How much does batching the toy suite save? The batched runner beside a loop over runs, in one process.

    python benchmarks/bench_toy_suite.py --steps 2000

Both step the same methods on the same data; the loop takes one method, one learning rate and one seed at a time. The
script first checks that the two end at the same weights and prints no time if they do not. Rows go to
``benchmarks/results/toy_suite.jsonl`` with device, versions, commit and shape.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import torch

from horst.lab.experiments import toy_suite
from horst.lab.experiments.methods import Method, methods_by_name
from horst.lab.experiments.result import environment


def loop(methods: list[Method], z: torch.Tensor, start: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """One run at a time: the final weights, ``(problems, rates, features)`` by method."""
    final = {}
    for method in methods:
        by_rate = []
        for lr in method.lrs:
            single = dataclasses.replace(method, lrs=(lr,))
            runs = [
                toy_suite.simulate([single], z[i : i + 1], start[i : i + 1], steps=steps, snapshots=2)
                for i in range(len(z))
            ]
            by_rate.append(torch.cat([run[method.name].thetas[-1] for run in runs]))
        final[method.name] = torch.cat(by_rate, dim=1)
    return final


def batched(methods: list[Method], z: torch.Tensor, start: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """All runs in one tensor."""
    found = toy_suite.simulate(methods, z, start, steps=steps, snapshots=2)
    return {name: trajectory.thetas[-1] for name, trajectory in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/toy_suite.jsonl"))
    arguments = parser.parse_args()
    config = toy_suite.Config(steps=arguments.steps)
    data, start = toy_suite.problem(config)
    methods = list(methods_by_name().values())
    runs = sum(len(method.lrs) for method in methods) * len(config.seeds)

    # A short run must agree before anything is timed; rounding differs, so compare where it has not yet grown.
    ours, theirs = (step(methods, data.z, start, 50) for step in (batched, loop))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)

    seconds = {}
    for name, step in (("batched", batched), ("loop", loop)):
        begin = time.perf_counter()
        step(methods, data.z, start, config.steps)
        seconds[name] = time.perf_counter() - begin
    row = {
        "benchmark": "toy_suite",
        "steps": config.steps,
        "runs": runs,
        "samples": config.n_samples,
        "features": config.n_features,
        "batched_seconds": round(seconds["batched"], 3),
        "loop_seconds": round(seconds["loop"], 3),
        "speedup": round(seconds["loop"] / seconds["batched"], 2),
        **environment(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    sys.stdout.write(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
