"""The quickstart: AdamW and HORST side by side on real text and images that every machine has, in minutes on two cores.

Tables 6 and 1 in miniature. A GPT learns the source of Python's standard library, byte by byte, and is pruned in one
shot by magnitude; a vision transformer learns scikit-learn's digits with AC/DC. All optimizers get the same seeds,
data, steps and learning rates. The text is learnt by HORST and by AdamW with the same ``l1`` too, which goes beyond
the paper. Last, ``horst.sparsify`` makes a larger GPT of AdamW's sparse and trains it further.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import pathlib
import platform
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from horst.lab.baselines.contenders import Alpha, Name, Optimization
from horst.lab.data.image_data import read_digits
from horst.lab.data.token_files import open_tokens
from horst.lab.data.tokenization import write_token_files
from horst.lab.experiments import table1_deit_acdc, table6_gpt2_one_shot
from horst.lab.experiments.language_model import (
    LanguageConfig,
    evaluate_language_model,
    run_identity,
    train_language_model,
)
from horst.lab.experiments.outcomes import load_or_run
from horst.lab.experiments.result import Found, Origin, Result, run_and_record
from horst.lab.experiments.vision_model import VisionConfig
from horst.lab.models.deit import DeiTConfig, build_deit
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.optimizers.param_groups import MirrorOn
from horst.pruning import prune
from horst.recovery import sparsify
from horst.training import Interrupted, LoopConfig, World, processes
from horst.training.torch_settings import threads

NAME = "quickstart"
LABELS = {"adamw": "AdamW", "horst": "HORST", "adamw-l1": "AdamW with l1", "horst-l1": "HORST with l1"}
# More do not help models this small; and not all cores: where another program wants one, threads that wait for each
# other make small steps ten times slower.
THREADS = 4
# One file in so many is held out, and scored as far as this many characters: evaluation takes the same time everywhere.
HELD_OUT, SCORED = 50, 3000
RECOVERY_STAGES = 4  # at most, of horst.sparsify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The quickstart.

    Args:
        seeds: Seeds of weights and data order; every optimizer runs with each.
        steps: Steps of each language model.
        epochs: Epochs of each vision model.
        lr: Learning rate of the language models.
        vision_lrs: Learning rates of the vision models. The paper's is 5e-3; AdamW does better with a larger one here.
        sparsities: Sparsities of the language models after training; the dense ones are always there.
        vision_sparsity: Sparsity that AC/DC trains to.
        alpha: HORST's alpha.
        l1: Soft threshold of two more contenders, AdamW and HORST with ``alpha="auto"``, on the matrices in the
            blocks; they train language models alone.
        recovery_steps: Steps in which a larger GPT is trained further once it is pruned.
        recovery_width: Width of that GPT; with 128 it has a million parameters.
        directory: Folder of an interrupted quickstart, which resumes from there; a finished one deletes it.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 500
    epochs: int = 30
    lr: float = 4e-3
    vision_lrs: tuple[float, ...] = (5e-3, 2e-2)
    sparsities: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    vision_sparsity: float = 0.9
    alpha: float = 5.0
    l1: float = 0.1
    recovery_steps: int = 300
    recovery_width: int = 128
    directory: pathlib.Path = pathlib.Path("runs/quickstart")

    def __post_init__(self) -> None:
        for name in ("seeds", "vision_lrs", "sparsities"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one value, none of them twice, got {values}.")
        # Now, and not after the first models are trained.
        if self.steps < 1 or self.epochs < 2:  # AC/DC needs room for its phases
            raise ValueError(f"steps must be at least 1 and epochs at least 2, got {self.steps} and {self.epochs}.")
        if self.recovery_steps < RECOVERY_STAGES + 1:
            least = RECOVERY_STAGES + 1
            raise ValueError(f"recovery_steps must be at least {least}, for all stages, got {self.recovery_steps}.")
        for value in (*self.sparsities, self.vision_sparsity):
            if not 0.0 < value < 1.0:
                raise ValueError(f"sparsities must lie in (0, 1), got {value}. Give a fraction: 0.9, not 90.")
        if not 0.0 <= self.l1 < math.inf:
            raise ValueError(f"l1 must be at least 0, got {self.l1}; 0 is no threshold.")
        for value in (self.lr, *self.vision_lrs):
            if not 0.0 < value < math.inf:
                raise ValueError(f"learning rates must be positive, got {value}.")

    @property
    def unfinished(self) -> pathlib.Path:
        """Text, checkpoints and outcomes, until all is done."""
        return self.directory / "unfinished"

    def language(self, data: pathlib.Path, optimizer: Name) -> LanguageConfig:
        """How the language models are trained."""
        alpha: Alpha = "auto" if optimizer == "horst-l1" else self.alpha
        # AdamW's l1 goes where mirror says, HORST's to the matrices in the blocks: both must threshold the same weights
        mirror: MirrorOn = "blocks" if optimizer == "adamw-l1" else "matrices"
        return LanguageConfig(
            data=data,
            model=GPT2Config(layers=2, heads=4, width=64, context=64, vocabulary=257),
            optimization=Optimization(lr=self.lr, betas=(0.9, 0.95), alpha=alpha, l1=self.l1, mirror=mirror),
            loop=LoopConfig(precision="float32", clip_norm=1.0, log_every=min(25, self.steps), checkpoint_every=None),
            steps=self.steps,
            batch_size=16,
            warmup_steps=self.steps // 10,
        )

    def larger(self, data: pathlib.Path) -> LanguageConfig:
        """How the GPT is trained that ``horst.sparsify`` takes: as AdamW's others, at half the learning rate."""
        run = self.language(data, "adamw")
        return dataclasses.replace(
            run,
            model=dataclasses.replace(run.model, layers=5, width=self.recovery_width),
            optimization=dataclasses.replace(run.optimization, lr=self.lr / 2),
        )

    def vision(self, lr: float) -> VisionConfig:
        """How the vision models are trained: what the paper says of its recipe, at this size."""
        return VisionConfig(
            dataset="digits",
            data=pathlib.Path(),
            model=DeiTConfig(
                image_size=8, patch_size=2, channels=1, classes=10, width=24, depth=2, heads=4, class_token=False
            ),
            optimization=Optimization(lr=lr, decay="all", alpha=self.alpha),
            loop=LoopConfig(precision="float32", clip_norm=1.0, log_every=50, checkpoint_every=None),
            epochs=self.epochs,
            batch_size=128,
            mixup=0.0,
            cutmix=0.0,
            padding=0,
            flip=False,
        )


def show(line: str) -> None:
    """The default of ``progress``: a line on stderr. The loop of each run shows a bar of its own in a terminal."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run(config: Config, progress: Callable[[str], None] = show) -> Result:
    """Train and prune everything; Ctrl-C ends it with what is there, and the next call resumes.

    Args:
        config: Sizes.
        progress: Function that is called with a line at the beginning and the end of each run.

    Raises:
        KeyboardInterrupt: Ctrl-C came before the first run was done, when there is nothing to return.
    """
    origins: list[Origin] = []
    language, vision = config.language(pathlib.Path(), "adamw").model, config.vision(config.lr).model
    setting = (
        f"a GPT of {language.layers} blocks of width {language.width} on Python's source, "
        f"a ViT of {vision.depth} blocks of width {vision.width} on digits"
    )
    return run_and_record(NAME, config, functools.partial(_body, config, progress, origins), "cpu", origins, setting)


def _body(config: Config, progress: Callable[[str], None], origins: list[Origin]) -> Found:
    rows: list[dict[str, Any]] = []
    histograms: dict[str, dict[str, Any]] = {"language": {}, "vision": {}}
    done = 0
    with processes("cpu") as world, threads(_thread_count()):
        data = config.unfinished / f"python-{platform.python_version()}"
        runs, notes = list(_runs(config, data)), _notes(config, data)
        for note in (*notes, f"{len(runs)} runs follow."):
            progress(note)
        try:
            _write_text(data)
            for number, (part, optimizer, about, compute) in enumerate(runs, 1):
                progress(f"[{number}/{len(runs)}] {about}")
                began = time.perf_counter()
                found = compute(world)
                progress(f"    {_in_words(found['rows'])} ({time.perf_counter() - began:.0f} s)")
                origins.append(found["origin"])
                rows += [{"part": part, **row} for row in found["rows"]]
                if "histogram" in found:  # not of a run that broke down
                    histograms[part].setdefault(optimizer, found["histogram"])
                done = number
        except (Interrupted, KeyboardInterrupt) as stop:
            if not rows:
                raise KeyboardInterrupt from stop
            progress(f"Interrupted after {done} of {len(runs)} runs. Run the same command again to resume.")
        else:
            shutil.rmtree(config.unfinished)
            with contextlib.suppress(OSError):  # other files may be there
                config.directory.rmdir()
    if done < len(runs):
        notes.insert(0, f"Partial: interrupted after {done} of {len(runs)} runs.")
    return rows, {"histograms": histograms, "runs": {"done": done, "planned": len(runs)}}, notes


def is_partial(result: Result) -> bool:
    """Whether it was interrupted.

    Example:
        >>> is_partial(run_and_record(NAME, Config(), lambda: ([], {"runs": {"done": 3, "planned": 18}}, [])))
        True
    """
    runs: dict[str, int] = result.curves["runs"]
    return runs["done"] < runs["planned"]


def _runs(config: Config, data: pathlib.Path) -> Iterator[tuple[str, Name, str, Callable[[World], dict[str, Any]]]]:
    """All runs, seed by seed so that an early end leaves pairs to compare: part, optimizer, words, what to call."""
    names: tuple[Name, ...] = ("adamw", "horst", "adamw-l1", "horst-l1")
    for seed in config.seeds:
        for name in names:
            table = table6_gpt2_one_shot.Config(
                run=config.language(data, name),
                sparsities=config.sparsities,
                prune_layers="blocks",
                directory=config.unfinished,
            )
            compute = functools.partial(table6_gpt2_one_shot.one_run, table, name, seed)
            yield "language", name, f"GPT with {LABELS[name]}, seed {seed}", compute
        for lr in config.vision_lrs:
            for name in names[:2]:
                about = f"ViT with AC/DC and {LABELS[name]}, learning rate {lr:g}, seed {seed}"
                yield "vision", name, about, functools.partial(_vision_run, config, lr, name, seed)
    about = f"larger GPT with AdamW, made sparse by horst.sparsify, seed {config.seeds[0]}"
    yield "recovery", "horst", about, functools.partial(_recovery_run, config, data, config.seeds[0])


def _vision_run(config: Config, lr: float, optimizer: Name, seed: int, world: World) -> dict[str, Any]:
    table = table1_deit_acdc.Config(run=config.vision(lr), directory=config.unfinished)
    found = table1_deit_acdc.one_run(table, optimizer, config.vision_sparsity, seed, world)
    return {**found, "rows": [found["row"]]}


def _recovery_run(config: Config, data: pathlib.Path, seed: int, world: World) -> dict[str, Any]:
    """AdamW's larger GPT pruned as far as the others, by SparseGPT at once and by horst.sparsify."""
    run, level = config.larger(data), max(config.sparsities)
    directory = config.unfinished / f"recovery-seed{seed}"

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"perplexity": float(evaluate_language_model(model, run, world)["perplexity"])}

    def compute() -> dict[str, Any]:
        model, _ = train_language_model(run, "adamw", seed, directory / "dense", world)
        tokens = open_tokens(data / "train.bin").tokens
        rows = len(tokens) // run.model.context
        windows = torch.from_numpy(tokens[: rows * run.model.context].astype("int64")).view(rows, -1)
        at_once = copy.deepcopy(model)
        prune(at_once, level, method="sparsegpt", data=list(windows[:64].split(8)))
        report = sparsify(
            model, windows, evaluate=evaluate, sparsity=level, steps=config.recovery_steps, batch_size=run.batch_size,
            samples=64, lr=run.optimization.lr, seed=seed, loop=run.loop,
        )  # fmt: skip
        found = {"dense": report.before["perplexity"], "SparseGPT": evaluate(at_once)["perplexity"]}
        found["horst.sparsify"] = report.after["perplexity"]
        about = {"optimizer": "horst", "alpha": 5.0, "seed": seed, "zeros": report.sparsity}
        return {"rows": [{**about, "method": k, "sparsity": level, "perplexity": v} for k, v in found.items()]}

    settings = {**run_identity(run, "adamw", seed), "recovery": [config.recovery_steps, level]}
    return load_or_run(directory / "outcome.json", settings, compute, str(world.device))


def _notes(config: Config, data: pathlib.Path) -> list[str]:
    """What is trained, in words."""
    language, vision = config.language(data, "adamw"), config.vision(config.vision_lrs[0])
    digits = read_digits()
    tokens = language.steps * language.batch_size * language.model.context
    return [
        f"Text: a GPT of {_size(GPT2(language.model)):,} parameters on the source of the standard library of Python "
        f"{platform.python_version()} ({len(_source_files())} files, one in {HELD_OUT} held out), {language.steps} "
        f"steps, {tokens:,} bytes; then one-shot magnitude pruning of all matrices in its blocks.",
        f"Images: a vision transformer of {_size(build_deit(vision.model)):,} parameters on {len(digits.images):,} of "
        f"scikit-learn's handwritten digits, {vision.epochs} epochs of AC/DC to {config.vision_sparsity:.0%} zeros in "
        f"its blocks; {len(digits.test_images)} test images, so one image is {1 / len(digits.test_images):.2%}.",
        f"Recovery: a GPT of {_size(GPT2(config.larger(data).model)):,} parameters, trained by AdamW in as many steps, "
        f"then pruned to {max(config.sparsities):.0%} zeros in stages by SparseGPT and trained by HORST for "
        f"{config.recovery_steps} steps, with the dense model as teacher.",
        "The models are a thousand times smaller than the paper's and stop long before they converge: this shows what "
        "the update does, not what it is worth at scale.",
    ]


def _source_files() -> list[pathlib.Path]:
    """The standard library's own modules, without its tests and what was installed beside it."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    found = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    if len(found) < 2 * HELD_OUT:
        raise FileNotFoundError(
            f"this Python has {len(found)} source files of its standard library in {root}; the quickstart reads them. "
            "Use a Python that comes with its source."
        )
    return found


def _write_text(folder: pathlib.Path) -> None:
    if (folder / "meta.json").is_file():
        return
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])

    def texts() -> Iterator[tuple[str, str]]:
        for path in _source_files():
            text = path.read_text(encoding="utf-8", errors="replace")
            held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % HELD_OUT == 0
            yield ("val", text[:SCORED]) if held_out else ("train", text)

    write_token_files(texts(), folder, tokenizer="bytes")


def _thread_count() -> int:
    return max(1, min(torch.get_num_threads(), THREADS, (os.cpu_count() or 1) // 2))


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _in_words(rows: list[dict[str, Any]]) -> str:
    if "broke_down" in rows[0]:
        return f"broke down: {rows[0]['broke_down']}"
    if rows[0].get("method") == "dense" and "zeros" in rows[0]:
        return "perplexity " + ", ".join(f"{row['perplexity']:.2f} {row['method']}" for row in rows)
    if "top1" in rows[0]:
        zeros = f"{rows[0]['zeros']:,} of {rows[0]['masked_weights']:,} weights zero"
        return f"{rows[0]['top1']:.1%} of the test images right, {zeros}"
    levels = ["dense" if not row["sparsity"] else f"at {row['sparsity']:.0%}" for row in rows]
    found = [f"{row['perplexity']:.2f} {level}" for row, level in zip(rows, levels, strict=True)]
    return "perplexity " + ", ".join(found)
