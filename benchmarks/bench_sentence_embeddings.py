"""How close a sparse sentence encoder stays to its dense self: pruned in one shot, and after ``horst.sparsify``.

    python benchmarks/bench_sentence_embeddings.py ./all-MiniLM-L6-v2 --data articles.jsonl.xz --sparsity 0.8 \\
        --out runs/sentence_embeddings.json

MODEL is an encoder of Hugging Face on disk whose sentence embeddings are the mean of its last hidden states. Rows have
the mean cosine between its embeddings and the dense model's on sentences of articles that were not trained on. The
articles of ``--data`` are cut into sentences: the first articles are the test, then come those to choose the learning
rate by (``validation``), then those to train on. Nothing but sentences is needed: the dense model's hidden states are
the lesson (SquareHead). The result is written again after every row.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import horst
from horst.cli.models import choose_device, load_model
from horst.extras import load_extra
from horst.lab.data.documents import Source
from horst.lab.experiments.result import Result, environment
from horst.parameters.modes import evaluating
from horst.pruning import prune
from horst.pruning.one_shot import METHODS
from horst.recovery.data import read_examples
from horst.training import LoopConfig

SHORTEST, LONGEST = 40, 300  # characters of a sentence
PER_ARTICLE = 50  # sentences, so that no article dominates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="text, as `horst data tokenize` takes it")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "horst"])
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128, help="sentences per step")
    parser.add_argument("--length", type=int, default=64, help="tokens that a sentence is cut to")
    parser.add_argument("--sentences", type=int, default=100_000, help="to train on, at most")
    parser.add_argument("--held-out", type=int, default=1000, help="sentences of the test, and of the validation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/sentence_embeddings.json"))
    arguments = parser.parse_args()
    began, device = time.perf_counter(), choose_device(arguments.device)
    model = load_model(arguments.model).model.float().to(device)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tokenizer = load_extra("transformers").AutoTokenizer.from_pretrained(arguments.model)

    def tokens(count: int) -> dict[str, Tensor]:
        text: list[str] = []
        while len(text) < count and (article := next(articles, None)) is not None:  # no article is in two parts
            text += article
        found = tokenizer(text[:count], padding=True, truncation=True, max_length=arguments.length, return_tensors="pt")
        return {key: found[key] for key in ("input_ids", "attention_mask")}

    articles = _articles(arguments.data)
    texts = {name: tokens(arguments.held_out) for name in ("test", "validation")}
    data = tokens(arguments.sentences)
    dense = {name: _embeddings(model, text) for name, text in texts.items()}

    def cosines(model: nn.Module) -> Mapping[str, float]:
        """Embeddings have length 1."""
        return {name: float((_embeddings(model, text) * dense[name]).sum(1).mean()) for name, text in texts.items()}

    rows: list[dict[str, Any]] = []

    def note(seed: int, training: str, method: str, lr: float | None, start: float, zeros: float) -> None:
        row = {"model": arguments.model.name, "seed": seed, "method": method, "training": training, "lr": lr}
        times = {"seconds": round(time.perf_counter() - start, 1)}
        rows.append({**row, "sparsity_of_pruned_layers": zeros, **cosines(model), **times})
        print(rows[-1], flush=True)
        config = {key: value for key, value in vars(arguments).items() if key not in ("out", "device")}
        config |= {"model": arguments.model.name, "data": arguments.data.name, "sentences": len(data["input_ids"])}
        Result(
            experiment="bench_sentence_embeddings",
            config=config,
            rows=rows,
            curves={},
            notes=[],
            environment=environment(str(device)),
            seconds=round(time.perf_counter() - began, 1),
        ).save(arguments.out)

    for seed in arguments.seeds:
        examples = read_examples(data, model, batch_size=arguments.batch, seed=seed)
        for method in METHODS:
            start = time.perf_counter()
            model.load_state_dict(weights)
            report = prune(model, arguments.sparsity, method=method, data=examples.calibration(128), samples=None)
            note(seed, "none", method, None, start, report.sparsity_of_pruned_layers)
        for lr, optimizer in itertools.product(arguments.lrs, arguments.optimizers):
            start = time.perf_counter()
            model.load_state_dict(weights)
            loop = LoopConfig(precision="bf16" if device.type == "cuda" else "float32", clip_norm=1.0, compile="off")
            done = horst.sparsify(
                model, data, sparsity=arguments.sparsity, optimizer=optimizer, lr=lr, steps=arguments.steps,
                batch_size=arguments.batch, seed=seed, loop=loop,
            )  # fmt: skip
            note(seed, optimizer, "sparsegpt", lr, start, done.sparsity)


def _articles(path: pathlib.Path) -> Iterator[list[str]]:
    """The sentences of each article, by a simple rule."""
    for document in Source(path).documents():
        found = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", document.text))
        yield list(itertools.islice((one for one in found if SHORTEST <= len(one) <= LONGEST), PER_ARTICLE))


@torch.no_grad()
def _embeddings(model: nn.Module, text: Mapping[str, Tensor]) -> Tensor:
    device, found = next(model.parameters()).device, []
    with evaluating(model):
        for ids, mask in zip(text["input_ids"].split(128), text["attention_mask"].split(128), strict=True):
            ids, mask = ids.to(device), mask.to(device)
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            found.append(F.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1))
    return torch.cat(found)


if __name__ == "__main__":
    main()
