"""Does a pretrained model survive its first steps under HORST? Perplexity on held-out text after a few steps.

    python benchmarks/bench_fine_tuning.py ./SmolLM2-135M --data articles.jsonl.xz --out fine_tuning.json

Any causal Hugging Face model on disk. Every optimizer begins with the same weights and sees the same batches; there is
no warm-up, so that nothing hides a step that is too large. The first articles are held out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import time
from typing import Any

import torch

from horst import HORST
from horst.cli.models import choose_device
from horst.lab.data.documents import Source
from horst.lab.experiments.result import Result, environment

CONTENDERS: dict[str, dict[str, Any]] = {
    "AdamW": {"alpha": 0.0},
    "HORST, alpha 5": {"alpha": 5.0},
    "HORST, alpha auto": {"alpha": "auto"},
}
HELD_OUT = 64  # sequences, from articles that are not trained on
ARTICLES = (40, 360)  # held out, trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="text, as `horst data tokenize` takes it")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 5, 10, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default=None, help="the GPU where there is one")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/fine_tuning.json"))
    arguments = parser.parse_args()
    import transformers

    device = choose_device(arguments.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    texts = [document.text for document in itertools.islice(Source(arguments.data).documents(), sum(ARTICLES))]
    held_out, train = (
        torch.tensor(tokenizer("\n\n".join(part))["input_ids"]) for part in (texts[: ARTICLES[0]], texts[ARTICLES[0] :])
    )
    held_out = held_out[: HELD_OUT * arguments.context].view(-1, arguments.context).to(device)
    rows = []
    began = time.perf_counter()
    for seed, name in itertools.product(arguments.seeds, CONTENDERS):
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
        optimizer = HORST(model.parameters(), lr=arguments.lr, weight_decay=0.0, **CONTENDERS[name])
        draws = torch.Generator().manual_seed(seed)
        for step in range(max(arguments.steps) + 1):
            if step in arguments.steps:
                alpha = optimizer.param_groups[0]["alpha"]
                found = {"step": step, "perplexity": perplexity(model, held_out)}
                rows.append({"optimizer": name, "alpha": alpha, "seed": seed, **found})
                print(rows[-1], flush=True)
            if step == max(arguments.steps):
                break
            starts = torch.randint(len(train) - arguments.context, (arguments.batch,), generator=draws)
            batch = torch.stack([train[i : i + arguments.context] for i in starts]).to(device)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    config = {**vars(arguments), "model": arguments.model.name, "data": arguments.data.name, "weight_decay": 0.0}
    del config["out"], config["device"]
    result = Result(
        experiment="bench_fine_tuning",
        config=config,
        rows=rows,
        curves={},
        notes=["No warm-up; betas (0.9, 0.999); the mirror step on all tensors."],
        environment=environment(str(device)),
        seconds=round(time.perf_counter() - began, 1),
    )
    print(f"-> {result.save(arguments.out)}")


@torch.no_grad()
def perplexity(model: torch.nn.Module, sequences: torch.Tensor) -> float:
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in sequences.split(8)]
    model.train()
    return math.exp(sum(losses) / len(losses))


if __name__ == "__main__":
    main()
