"""What ``horst.sparsify`` wins back: one-shot pruning, then each way of training on, at one budget of tokens.

    python benchmarks/bench_sparsify.py MODEL --train tokens/train.bin --test wikitext/train.bin \\
        --contender one-shot adamw horst --tune 0.6 --then 2:4 --tokens 20000000 \\
        --out runs/recovery.json

MODEL is a causal language model on disk: of Hugging Face, or of a finished run of ours. The token files are those of
``horst data tokenize``; beside ``train.bin`` lies ``val.bin``. Each contender is trained at the pattern of ``--tune``
with each of ``--lrs``; the learning rate with the lowest perplexity on the validation text serves its other patterns.
Runs of ``--also`` follow: ``admm=adamw@2:4`` trains admm at 2:4 with the learning rate that was best for adamw.
All contenders start from the same weights and see the same batches; where SparseGPT prunes at once, its weights are
computed once per pattern and shared; ``horst-stages`` and ``horst-l1`` prune in stages beyond 60 %. ``one-shot`` prunes
and does not train; ``dense`` trains on without pruning, which says how much of a gain is the text and not the method.
The test text is never used to choose.

Contenders take turns, so that each has as many runs when ``--seconds`` are over: no run begins after that. The result
is written again after every run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

import horst
from horst.cli.models import choose_device, load_model
from horst.cli.parsing import read_pattern
from horst.lab.data.token_files import open_tokens
from horst.lab.experiments.result import Result, environment
from horst.pruning import Report, prune
from horst.pruning.one_shot import METHODS
from horst.recovery import SparsifyConfig
from horst.recovery.data import fingerprint, read_examples
from horst.recovery.teacher import copy_as_teacher
from horst.training import LoopConfig, NonFiniteLoss, perplexity
from horst.training.config import Compile
from horst.training.evaluate import IGNORED

CONTENDERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "stages": ()},
    "horst": {"stages": ()},
    "horst-auto": {"alpha": "auto", "stages": ()},
    "horst-stages": {},
    "horst-l1": {},  # l1 by the rule for the number of steps
    "refresh": {"train": "refresh", "stages": ()},
    "admm": {"train": "admm", "optimizer": "adamw"},
    "ast": {"train": "ast", "optimizer": "adamw"},
    "cast": {"train": "cast", "optimizer": "adams"},
    "dense": {"optimizer": "adamw", "sparsity": 0.0, "method": "magnitude"},
}
HELD_OUT = 256  # windows of the validation text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--train", type=pathlib.Path, required=True, help="train.bin, with val.bin beside it")
    parser.add_argument("--test", type=pathlib.Path, required=True, help="token file to judge by")
    parser.add_argument("--contender", choices=["one-shot", *CONTENDERS], nargs="+", required=True)
    parser.add_argument("--also", nargs="*", default=[], help="NAME=TUNED@PATTERN: a run at the rate of another")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="tried at --tune")
    parser.add_argument("--tune", default="0.6", help="pattern at which the learning rate is chosen")
    parser.add_argument("--then", nargs="*", default=[], help="further patterns: 0.7, or 2:4")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of each run")
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on")
    parser.add_argument("--seed", type=int, default=0, help="of calibration and order of the text")
    parser.add_argument("--compile", choices=get_args(Compile), default=LoopConfig().compile)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run begins after so many seconds")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/recovery.json"))
    Benchmark(parser.parse_args()).run()


class Benchmark:
    """The model, its text, what was pruned and judged already, and the rows so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.device = choose_device(arguments.device)
        self.loaded = load_model(arguments.model)
        self.model = self.loaded.model.float().to(self.device)
        self.dense = copy.deepcopy(self.model.state_dict())
        self.teacher = copy_as_teacher(self.model)
        self.data = self._windows(arguments.train)
        validation = self._windows(arguments.train.with_name("val.bin"))[:HELD_OUT]
        self.texts = {"validation": validation, "test": self._windows(arguments.test)}
        examples = read_examples(self.data, self.model, batch_size=arguments.batch, seed=arguments.seed)
        self.calibration = examples.calibration(arguments.samples)
        self.pruned: dict[tuple[str, str], tuple[dict[str, Tensor], Report]] = {}
        self.known: dict[int, Mapping[str, float]] = {}  # of weights that were judged before, by their hash
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def run(self) -> None:
        """What is pruned in one shot; each contender at the first pattern; each at the others, with its best rate."""
        arguments = self.arguments
        also = [_read_run(words) for words in arguments.also]
        trained = [name for name in arguments.contender if name != "one-shot"]
        if len(trained) < len(arguments.contender):
            self._note("one-shot", "0", {"method": "dense", **self._evaluate(self.model)})
            for pattern, method in itertools.product([arguments.tune, *arguments.then], METHODS):
                if self._has_time():
                    self._prune(pattern, method)
        found: dict[str, dict[float, float]] = {name: {} for name in trained}
        for lr, name in itertools.product(arguments.lrs, trained):
            if self._has_time():
                found[name][lr] = self._train(name, arguments.tune, lr)
        best = {name: min(found[name], key=found[name].__getitem__) for name in trained if found[name]}
        runs = [(name, name, pattern) for pattern, name in itertools.product(arguments.then, trained)]
        for name, tuned, pattern in [*runs, *also]:
            if self._has_time():
                self._train(name, pattern, best[tuned])

    def _prune(self, pattern: str, method: str) -> None:
        start = time.perf_counter()
        _, report = self._weights(pattern, method)
        times = {"seconds": round(time.perf_counter() - start, 1)}
        self._note("one-shot", pattern, {"method": method, **report.shares(), **self._evaluate(self.model), **times})

    def _weights(self, pattern: str, method: str = "sparsegpt") -> tuple[dict[str, Tensor], Report]:
        """Load the dense weights as one pruning leaves them, which is done once."""
        key = pattern, method
        if key not in self.pruned:
            self.model.load_state_dict(self.dense)
            report = prune(self.model, **_amount(pattern), method=method, data=self.calibration, samples=None)
            self.pruned[key] = (copy.deepcopy(self.model.state_dict()), report)
        self.model.load_state_dict(self.pruned[key][0])
        return self.pruned[key]

    def _train(self, contender: str, pattern: str, lr: float) -> float:
        arguments, start = self.arguments, time.perf_counter()
        settings = {**_amount(pattern), **CONTENDERS[contender]}
        if contender == "horst-l1":
            steps = max(1, arguments.tokens // (arguments.batch * arguments.context))
            settings["l1"] = round(1.2 / math.sqrt(steps), 3)
        precision = "bf16" if self.device.type == "cuda" else "float32"
        config = SparsifyConfig(
            **settings, lr=lr, tokens=arguments.tokens, batch_size=arguments.batch, samples=arguments.samples,
            seed=arguments.seed, loop=LoopConfig(precision=precision, clip_norm=1.0, compile=arguments.compile),
        )  # fmt: skip
        is_shared = config.train == "fixed" and config.method == "sparsegpt" and len(config.targets) == 1
        if is_shared:
            self._weights(pattern)
        else:
            self.model.load_state_dict(self.dense)
        # Of weights that are pruned already, the smallest are their zeros: magnitude finds the same masks.
        again = {"method": "magnitude"} if is_shared else {}
        tried = {"lr": lr, "settings": settings}
        try:
            report = horst.sparsify(
                self.model, self.data, evaluate=self._evaluate, teacher=self.teacher, config=config, **again
            )
        except NonFiniteLoss as error:  # the rate is too large; the others are tried all the same
            self._note(contender, pattern, {**tried, "failed": str(error)})
            return float("inf")
        stage = report.stages[-1]
        self._note(contender, pattern, {
            **tried, "tokens": report.units,
            **{f"pruned_{name}": value for name, value in stage.pruned.items()},
            **report.after, **report.layers.shares(), "tokens_per_second": stage.units_per_second,
            "training_seconds": round(report.seconds, 1), "seconds": round(time.perf_counter() - start, 1),
        })  # fmt: skip
        return float(report.after["validation"])

    def _evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Perplexity on both texts; what was judged before is looked up."""
        key = fingerprint(list(model.parameters()))
        if key not in self.known:
            self.known[key] = {name: _perplexity(model, rows, self.device) for name, rows in self.texts.items()}
        return self.known[key]

    def _windows(self, path: pathlib.Path) -> Tensor:
        context, tokens = self.arguments.context, open_tokens(path, vocabulary=self.loaded.vocabulary).tokens
        return torch.from_numpy(tokens[: len(tokens) // context * context].astype("int32")).view(-1, context)

    def _has_time(self) -> bool:
        if time.perf_counter() - self.began <= self.arguments.seconds:
            return True
        if not self.notes:
            self.notes.append(f"Stopped after {self.arguments.seconds:g} s: not all runs were made.")
            self._save()
        return False

    def _note(self, contender: str, pattern: str, row: dict[str, Any]) -> None:
        seed = self.arguments.seed
        self.rows.append(
            {"model": self.loaded.path.name, "contender": contender, "pattern": pattern, "seed": seed, **row}
        )
        print(self.rows[-1], flush=True)
        self._save()

    def _save(self) -> None:
        config = {name: value for name, value in vars(self.arguments).items() if name not in ("out", "device")}
        config |= {name: config[name].name for name in ("model", "train", "test")}
        config |= {f"{name}_tokens": rows.numel() for name, rows in self.texts.items()}
        config["seconds"] = None if config["seconds"] == float("inf") else config["seconds"]
        Result(
            experiment="bench_sparsify",
            config=config,
            rows=self.rows,
            curves={},
            notes=self.notes,
            environment=environment(str(self.device)),
            seconds=round(time.perf_counter() - self.began, 1),
        ).save(self.arguments.out)


def _read_run(words: str) -> tuple[str, str, str]:
    """NAME=TUNED@PATTERN, taken apart."""
    contender, _, pattern = words.partition("@")
    name, _, tuned = contender.partition("=")
    if name not in CONTENDERS or tuned not in CONTENDERS or not pattern:
        raise SystemExit(f"--also takes NAME=TUNED@PATTERN with names of {', '.join(CONTENDERS)}, got {words!r}")
    return name, tuned, pattern


def _amount(pattern: str) -> dict[str, Any]:
    """The settings of a pattern: 0.7 is a sparsity, 2:4 fixes its own."""
    return {"pattern": read_pattern(pattern), "sparsity": None} if ":" in pattern else {"sparsity": float(pattern)}


def _perplexity(model: nn.Module, rows: Tensor, device: torch.device) -> float:
    def batches() -> Any:
        for part in rows.long().split(16):
            targets = torch.cat([part[:, 1:], torch.full_like(part[:, :1], IGNORED)], 1)
            yield part.to(device), targets.to(device)

    return perplexity(model, batches(), precision="bf16" if device.type == "cuda" else "float32")["perplexity"]


if __name__ == "__main__":
    main()
