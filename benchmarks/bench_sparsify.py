"""What ``horst.sparsify`` wins back: one-shot pruning, then each way of training on, at one budget of tokens.

    python benchmarks/bench_sparsify.py MODEL --train tokens/train.bin --test wikitext/train.bin \\
        --contender horst --tune 0.6 --then 2:4 0.7 0.8 --tokens 10000000 --out runs/recovery_horst.json

MODEL is a causal language model on disk: of Hugging Face, or of a finished run of ours. The token files are those of
``horst data tokenize``; beside ``train.bin`` lies ``val.bin``. A contender is trained at the pattern of ``--tune`` with
each of ``--lrs``; the learning rate with the lowest perplexity on the validation text serves its other patterns. All
contenders start from the same weights and see the same batches. ``one-shot`` prunes and does not train; ``dense``
trains on without pruning, which says how much of a gain is the text and not the method. The test text is never used to
choose. The result is written again after every run, so that what is done survives what is not.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import horst
from horst.cli.models import choose_device, load_model
from horst.cli.parsing import read_pattern
from horst.lab.data.token_files import open_tokens
from horst.lab.experiments.result import Result, environment
from horst.pruning import prune
from horst.pruning.one_shot import METHODS
from horst.recovery import SparsifyConfig
from horst.training import LoopConfig, perplexity
from horst.training.evaluate import IGNORED

CONTENDERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "horst": {},
    "horst-auto": {"alpha": "auto"},
    "horst-l1": {"l1": 0.01},
    "refresh": {"train": "refresh"},
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
    parser.add_argument("--contender", choices=["one-shot", *CONTENDERS], required=True)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="tried at --tune")
    parser.add_argument("--tune", default="0.6", help="pattern at which the learning rate is chosen")
    parser.add_argument("--then", nargs="*", default=[], help="further patterns: 0.7, or 2:4")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/recovery.json"))
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    loaded = load_model(arguments.model)
    dense = copy.deepcopy(loaded.model.state_dict())
    loaded.model.to(device)

    def windows(path: pathlib.Path) -> Tensor:
        tokens = open_tokens(path, vocabulary=loaded.vocabulary).tokens
        whole = len(tokens) // arguments.context * arguments.context
        return torch.from_numpy(tokens[:whole].astype("int32")).view(-1, arguments.context)

    data = windows(arguments.train)
    texts = {"validation": windows(arguments.train.with_name("val.bin"))[:HELD_OUT], "test": windows(arguments.test)}

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        return {name: _perplexity(model, rows, device) for name, rows in texts.items()}

    began = time.perf_counter()
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append({"model": loaded.path.name, "contender": arguments.contender, **row})
        print(rows[-1], flush=True)
        _save(arguments, rows, texts, device, began)

    patterns = [arguments.tune, *arguments.then]
    if arguments.contender == "one-shot":
        note({"pattern": "0", "method": "dense", **evaluate(loaded.model)})
        calibration = [part.long() for part in data[:128].split(8)]
        for pattern in patterns:
            for method in METHODS:
                loaded.model.load_state_dict(dense)
                report = prune(loaded.model, **_amount(pattern), method=method, data=calibration)
                note({"pattern": pattern, "method": method, **report.shares(), **evaluate(loaded.model)})
        return

    def run(pattern: str, lr: float) -> float:
        loaded.model.load_state_dict(dense)
        settings = {**_amount(pattern), **CONTENDERS[arguments.contender]}
        config = SparsifyConfig(
            **settings, lr=lr, tokens=arguments.tokens, batch_size=arguments.batch,
            loop=LoopConfig(precision="bf16" if device.type == "cuda" else "float32", clip_norm=1.0),
        )  # fmt: skip
        start = time.perf_counter()
        report = horst.sparsify(loaded.model, data, evaluate=evaluate, config=config)
        pruned = {f"pruned_{name}": value for name, value in report.stages[-1].pruned.items()}
        after = {**report.after, **report.layers.shares()}
        times = {"training_seconds": round(report.seconds, 1), "seconds": round(time.perf_counter() - start, 1)}
        note({"pattern": pattern, "lr": lr, "settings": settings, "tokens": report.units, **pruned, **after, **times})
        return float(report.after["validation"])

    found = {lr: run(arguments.tune, lr) for lr in arguments.lrs}
    best = min(found, key=lambda lr: found[lr])
    for pattern in arguments.then:
        run(pattern, best)


def _amount(pattern: str) -> dict[str, Any]:
    """The settings of a pattern: 0.7 is a sparsity, 2:4 fixes its own."""
    return {"pattern": read_pattern(pattern), "sparsity": None} if ":" in pattern else {"sparsity": float(pattern)}


def _perplexity(model: nn.Module, rows: Tensor, device: torch.device) -> float:
    def batches() -> Any:
        for part in rows.long().split(16):
            targets = torch.cat([part[:, 1:], torch.full_like(part[:, :1], IGNORED)], 1)
            yield part.to(device), targets.to(device)

    return perplexity(model, batches(), precision="bf16" if device.type == "cuda" else "float32")["perplexity"]


def _save(arguments: Any, rows: list[Any], texts: dict[str, Tensor], device: torch.device, began: float) -> None:
    config = {name: value for name, value in vars(arguments).items() if name not in ("out", "device")}
    config |= {name: config[name].name for name in ("model", "train", "test")}
    config |= {f"{name}_tokens": rows.numel() for name, rows in texts.items()}
    Result(
        experiment="bench_sparsify",
        config=config,
        rows=rows,
        curves={},
        notes=[],
        environment=environment(str(device)),
        seconds=round(time.perf_counter() - began, 1),
    ).save(arguments.out)


if __name__ == "__main__":
    main()
