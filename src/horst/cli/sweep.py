"""``horst sweep RECIPE``: the runs of a table side by side, as processes of this machine or as jobs of SLURM.

Takes what ``horst run RECIPE`` takes. Each combination of seed, optimizer and sparsity is a job; what a job finds
stands in its run's directory, so an interrupted sweep resumes where it stopped. At the end the recipe itself puts the
table together, and finds every run done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import traceback
from collections.abc import Collection, Generator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, cast

from horst.cli.destination import Stopped, check_free
from horst.cli.output import write
from horst.cli.progress import bar
from horst.cli.recipes import RecipeOptions, parse_recipe, recipe_completion
from horst.extras import load_extra

AXES = {"seeds": "seed", "optimizers": "", "sparsities": "sparsity"}  # field of a config -> word in a job's name
_Done = tuple[str, str | None]  # a job's name, and why it failed
_LOOK_EVERY = 0.5  # seconds between looks for a signal: it does not wake what waits for processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RecipeOptions):
    """A recipe with its config, and where its jobs run."""

    on: Literal["here", "slurm"] = "here"
    """Processes of this machine, or jobs of SLURM through submitit."""
    jobs: int = 1
    """Number of jobs at a time. On this machine they share the cores, and take the GPUs in turn."""
    logs: Path = Path("runs/logs")
    """Folder of what the jobs print: one file per job."""
    partition: str | None = None
    """SLURM's partition."""
    minutes: int = 24 * 60
    """SLURM: minutes per job."""
    gpus: int = 1
    """SLURM: GPUs per job."""
    cpus: int = 8
    """SLURM: cores per job."""
    gigabytes: int = 64
    """SLURM: gigabytes of memory per job."""


parse = functools.partial(parse_recipe, Options)
completion = functools.partial(recipe_completion, Options)


def main(options: Any) -> int:
    """Run every job, then put the table together; 1 if a job failed."""
    from horst.lab.experiments.recipes import RECIPES

    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}.")
    cells = split(options.recipe, options.config)
    check_free(options.result_file, options.overwrite, "file")
    launch = _on_slurm if options.on == "slurm" else _here
    failures: dict[str, str] = {}
    with bar(options.recipe, len(cells), lines=False) as progress, contextlib.closing(launch(options, cells)) as jobs:
        for done, (name, failure) in enumerate(jobs, 1):
            progress(done)
            if failure is not None:
                failures[name] = failure
            write(f"{done} of {len(cells)}: {name} {'done' if failure is None else 'failed'}", sys.stderr)
    if failures:
        for name, failure in failures.items():
            write(f"horst sweep: {name} failed: {failure} See {options.logs / name}.log.", sys.stderr)
        return 1
    result = RECIPES[options.recipe].run(options.config)  # finds every run done
    options.save(result, f"{len(cells)} jobs")
    return 0


def split(recipe: str, config: Any) -> dict[str, Any]:
    """The config of each job, by its name."""
    from horst.lab.experiments.recipes import RECIPES

    axes = [axis for axis in AXES if getattr(config, axis, ())]
    if RECIPES[recipe].sparsities_in_one_run:
        axes.remove("sparsities")
    if not axes or not hasattr(config, "directory"):
        raise ValueError(f"{recipe} is one run, not one per seed, optimizer or sparsity: use horst run {recipe}.")
    cells = {}
    for values in itertools.product(*(getattr(config, axis) for axis in axes)):
        name = "-".join([recipe, *(f"{AXES[axis]}{value}" for axis, value in zip(axes, values, strict=True))])
        cells[name] = dataclasses.replace(config, **{axis: (v,) for axis, v in zip(axes, values, strict=True)})
    return cells


def run_cell(recipe: str, config: Any) -> None:
    """One job. The recipe leaves what it finds in the config's directory."""
    from horst.lab.experiments.recipes import RECIPES

    RECIPES[recipe].run(config)


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """A job that runs here: its process, its place among those that run at a time, and where it says why it failed."""

    name: str
    process: SpawnProcess
    place: int
    failure: Connection

    def outcome(self) -> _Done:
        """Of one whose process has ended."""
        self.process.join()
        with self.failure, contextlib.suppress(EOFError):  # it had nothing to say
            if self.failure.poll():
                return self.name, self.failure.recv()
        if self.process.exitcode:
            return self.name, "its process was killed; there may be too little memory for so many --jobs."
        return self.name, None


def _here(options: Any, cells: dict[str, Any]) -> Generator[_Done, None, None]:
    """Each job in a process of its own, so many at a time; a signal to this process ends them all."""
    import torch

    from horst.training.interruption import StopRequest

    devices = torch.cuda.device_count() if options.jobs > 1 else 0
    threads = max(1, torch.get_num_threads() // options.jobs)
    options.logs.mkdir(parents=True, exist_ok=True)
    waiting = list(reversed(cells.items()))
    running: dict[int, _Job] = {}  # by what the system reports the process's end by
    with StopRequest() as stop:
        try:
            while (waiting or running) and not stop.signal:
                while waiting and len(running) < options.jobs:
                    name, config = waiting.pop()
                    place = min(set(range(options.jobs)) - {job.place for job in running.values()})
                    device = place % devices if devices else None
                    log = options.logs / f"{name}.log"
                    job = _start(name, place, (log, options.recipe, config, device, threads))
                    running[job.process.sentinel] = job
                for ended in wait(list(running), timeout=_LOOK_EVERY):
                    yield running.pop(cast(int, ended)).outcome()
        finally:
            _end(running.values())
        if stop.signal:
            raise Stopped(
                stop.signal, "a run that was in training has saved its state. The same command does what is missing."
            )


def _end(jobs: Collection[_Job]) -> None:
    """Tell the jobs to save and stop, and wait until they are gone; another Ctrl-C ends them at once."""
    try:
        for job in jobs:
            # Not the signal that came: after a Ctrl-C in the terminal, which reaches all processes, a second one would
            # end a run before it has saved. SIGTERM never does.
            job.process.terminate()
        for job in jobs:
            job.process.join()
    except KeyboardInterrupt:
        for job in jobs:
            job.process.kill()
        raise


def _start(name: str, place: int, arguments: tuple[Any, ...]) -> _Job:
    context = get_context("spawn")  # a fork of a process with threads, as torch's are, may hang
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_job_process, args=(sender, *arguments), name=name)
    process.start()
    sender.close()  # the process has its own
    return _Job(name, process, place, receiver)


def _job_process(failure: Connection, log: Path, recipe: str, config: Any, device: int | None, threads: int) -> None:
    """One job with its GPU and its share of the cores.

    Everything that it prints goes to its log: bars of several processes would tear the terminal apart.
    """
    import torch

    from horst.cli.progress import logging_to_stderr

    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
    torch.set_num_threads(threads)
    try:
        with open(log, "w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                with logging_to_stderr():
                    run_cell(recipe, config)
            except Exception:
                traceback.print_exc()
                raise
    except BaseException as error:  # a run that was told to stop among them
        failure.send(_reason(error))


def _on_slurm(options: Any, cells: dict[str, Any], cluster: str = "slurm") -> Generator[_Done, None, None]:
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
        error = job.exception()
        yield name, None if error is None else _reason(error)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
