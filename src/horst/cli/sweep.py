"""``horst sweep RECIPE``: the runs of a table side by side, as processes of this machine or as jobs of SLURM.

Takes what ``horst run RECIPE`` takes. Each combination of seed, optimizer and sparsity is a job; what a job finds
stands in its run's directory, so a sweep that was broken off goes on where it was, and the table is put together at the
end by the recipe itself, which finds every run done.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from horst.cli.destination import check_free
from horst.cli.output import table, write, write_json
from horst.cli.progress import bar
from horst.cli.recipes import RecipeOptions, parse_recipe, recipe_completion
from horst.extras import load_extra

AXES = ("seeds", "optimizers", "sparsities")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RecipeOptions):
    """A recipe with its config, and where its jobs run."""

    on: Literal["here", "slurm"] = "here"
    """Processes of this machine, or jobs of SLURM through submitit."""
    jobs: int = 1
    """How many at a time. Here they share out the cores, and the GPUs by turns."""
    logs: Path = Path("runs/logs")
    """What the jobs print: one file a job."""
    partition: str | None = None
    """Of SLURM."""
    minutes: int = 24 * 60
    """Of SLURM: a job's time."""
    gpus: int = 1
    """Of SLURM: a job's GPUs."""
    cpus: int = 8
    """Of SLURM: a job's cores."""
    gigabytes: int = 64
    """Of SLURM: a job's memory."""


def parse(arguments: Sequence[str], prog: str) -> Any:
    """The recipe's name, its scale, its config's fields and the sweep's own as options."""
    return parse_recipe(Options, arguments, prog)


def completion() -> Any:
    """What a shell can complete."""
    return recipe_completion(Options)


def main(options: Any) -> int:
    """Run every job, then put the table together; 1 if a job failed."""
    from horst.experiments.recipes import RECIPES

    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}.")
    cells = split(options.recipe, options.config)
    check_free(options.result_file, options.overwrite, "file")
    launch = _on_slurm if options.on == "slurm" else _here
    failures: dict[str, str] = {}
    with bar(options.recipe, len(cells)) as progress:
        for done, (name, failure) in enumerate(launch(options, cells), 1):
            progress(done)
            if failure is not None:
                failures[name] = failure
            write(f"{done} of {len(cells)}: {name} {'done' if failure is None else 'failed'}", sys.stderr)
    if failures:
        for name, failure in failures.items():
            write(f"horst sweep: {name} failed: {failure} See {options.logs / name}.log.", sys.stderr)
        return 1
    result = RECIPES[options.recipe].run(options.config)  # finds every run done
    path = result.save(options.result_file)
    if options.json:
        write_json(result.rows)
    else:
        write(table(result.rows, f"{options.recipe}, {len(cells)} jobs") + f"\n-> {path}")
    return 0


def split(recipe: str, config: Any) -> dict[str, Any]:
    """The config of each job, by its name."""
    from horst.experiments.recipes import RECIPES

    axes = [axis for axis in AXES if hasattr(config, axis) and getattr(config, axis)]
    if RECIPES[recipe].sparsities_in_one_run:
        axes.remove("sparsities")
    if not axes or not hasattr(config, "directory"):
        raise ValueError(f"{recipe} is one run, not one a seed, optimizer or sparsity: use horst run {recipe}.")
    cells = {}
    for values in itertools.product(*(getattr(config, axis) for axis in axes)):
        name = "-".join([recipe, *(f"{_SINGULAR[axis]}{value}" for axis, value in zip(axes, values, strict=True))])
        cells[name] = dataclasses.replace(config, **{axis: (v,) for axis, v in zip(axes, values, strict=True)})
    return cells


_SINGULAR = {"seeds": "seed", "optimizers": "", "sparsities": "sparsity"}
_Done = tuple[str, str | None]  # a job's name, and why it failed


def run_cell(recipe: str, config: Any) -> None:
    """One job. The recipe leaves what it finds in the config's directory."""
    from horst.experiments.recipes import RECIPES

    RECIPES[recipe].run(config)


def _here(options: Any, cells: dict[str, Any]) -> Iterator[_Done]:
    import torch

    devices = torch.cuda.device_count() if options.jobs > 1 else 0
    context = get_context("spawn")  # a fork of a process with threads, as torch's are, may hang
    counter = context.Value("i", 0)
    threads = max(1, torch.get_num_threads() // options.jobs)
    options.logs.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(
        options.jobs, context, initializer=_start_worker, initargs=(counter, devices, threads)
    ) as pool:
        futures: dict[Future[None], str] = {
            pool.submit(_logged_cell, options.logs / f"{name}.log", options.recipe, config): name
            for name, config in cells.items()
        }
        try:
            for future in as_completed(futures):
                yield futures[future], _failure(future.exception)
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(counter: Any, devices: int, threads: int) -> None:
    """A worker keeps its GPU and its share of the cores."""
    import torch

    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % devices)
    torch.set_num_threads(threads)


def _logged_cell(log: Path, recipe: str, config: Any) -> None:
    """Everything that a job prints goes to its log: bars of several processes would tear the terminal apart."""
    from horst.cli.progress import logging_to_stderr

    with open(log, "w", buffering=1) as file:
        sys.stdout = sys.stderr = file
        try:
            with logging_to_stderr():
                run_cell(recipe, config)
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _on_slurm(options: Any, cells: dict[str, Any], cluster: str = "slurm") -> Iterator[_Done]:
    executor = load_extra("submitit").AutoExecutor(folder=options.logs, cluster=cluster)
    settings: dict[str, Any] = {
        "name": f"horst-{options.recipe}",
        "timeout_min": options.minutes,
        "gpus_per_node": options.gpus,
        "cpus_per_task": options.cpus,
        "mem_gb": options.gigabytes,
        "slurm_array_parallelism": options.jobs,
        "slurm_partition": options.partition,
    }
    executor.update_parameters(**{key: value for key, value in settings.items() if value is not None})
    jobs = executor.map_array(run_cell, [options.recipe] * len(cells), list(cells.values()))
    for name, job in zip(cells, jobs, strict=True):
        write(f"{name} is job {job.job_id}", sys.stderr)
    for name, job in zip(cells, jobs, strict=True):
        yield name, _failure(job.exception)


def _failure(exception: Callable[[], BaseException | None]) -> str | None:
    error = exception()
    if isinstance(error, BrokenProcessPool):
        return "its process was killed; there may be too little memory for so many --jobs."
    return None if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
