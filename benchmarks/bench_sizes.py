"""How small a model gets, and what that costs: zeros and few bits in one file, beside few bits alone.

    python benchmarks/bench_sizes.py MODEL --train tokens/train.bin --test wikitext/test.bin --out runs/sizes.json

MODEL is a causal language model on disk: of Hugging Face, or of a finished run of ours. The token files are those of
``horst data tokenize``. Rows are the dense model with its matrices in each of ``--values``, rounded to the nearest, and
SparseGPT at each of ``--sparsities``, which rounds as it prunes; sparsity 0 rounds alone, and is for integers. int3 and
int2 are for the dense model. Every row is written to a file, loaded from it, and judged as loaded. Embeddings and head
are float32 and bfloat16 beside such matrices, and ``--head-values`` beside integers.

One calibration of the dense model serves all rows; with ``--sequential`` each row is calibrated on what its own pruned
blocks return, as ``horst prune`` does, which takes longer. The result is written again after every row.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import pathlib
import tempfile
import time
from typing import Any

from horst.cli.models import choose_device, load_model
from horst.cli.texts import calibration_windows
from horst.export import load_sparse, read_layout, save_sparse
from horst.lab.data.token_batches import evaluation_batches
from horst.lab.experiments.result import Result, environment
from horst.parameters.quantization import GROUP_SIZE
from horst.pruning.one_shot import Plan
from horst.training import perplexity

FLOATS, INTEGERS = ("float32", "bfloat16"), ("int8", "int4", "int3", "int2")
FOR_ZEROS = (*FLOATS, "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--train", type=pathlib.Path, required=True, help="token file to calibrate on")
    parser.add_argument("--test", type=pathlib.Path, required=True, help="token file to judge by")
    parser.add_argument("--sparsities", type=float, nargs="*", default=[0.0, 0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--values", nargs="+", choices=[*FLOATS, *INTEGERS], default=[*FLOATS, *INTEGERS])
    parser.add_argument("--head-values", default="int8", help="precision of embeddings and head beside integers")
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE)
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=16, help="windows per batch")
    parser.add_argument("--test-tokens", type=int, default=500_000, help="at most so many are judged")
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/sizes.json"))
    arguments = parser.parse_args()
    Sizes(arguments).run()


class Sizes:
    """The model, its calibration, and the rows so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.perf_counter()
        self.device = choose_device(arguments.device)
        self.loaded = load_model(arguments.model)
        self.model = self.loaded.model.float()
        self.dense = copy.deepcopy(self.model.state_dict())
        self.model.to(self.device)
        windows = calibration_windows(
            arguments.train, self.loaded, context=arguments.context, samples=arguments.samples, seed=0
        )
        self.data = [part for batch in windows for part in batch.split(arguments.batch)]
        self.prepared = None if arguments.sequential else self._plan(None).prepare()
        self.matrices = {layer.name: layer.param.numel() for layer in self._plan(None).found}
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Each row in turn."""
        for values in self.arguments.values:
            self._row(None, "nearest", values)
        for sparsity in self.arguments.sparsities:
            for values in self.arguments.values:
                if values in (FOR_ZEROS if sparsity else INTEGERS):
                    self._row(sparsity, "sparsegpt", values)

    def _row(self, sparsity: float | None, rounding: str, values: str) -> None:
        start = time.perf_counter()
        self.model.load_state_dict(self.dense)
        if sparsity is not None:
            # Floating-point values are rounded by the file alone.
            plan = self._plan(values if values in INTEGERS else None)
            if self.prepared is None:
                plan.prune(sparsity, sequential=True)
            else:
                plan.apply(sparsity, self.prepared)
        head = {"float32": None, "bfloat16": "bfloat16"}.get(values, self.arguments.head_values)
        with tempfile.TemporaryDirectory() as folder:
            path = save_sparse(
                self.model, pathlib.Path(folder) / "model", values=values, head_values=head,
                group_size=self.arguments.group_size,
            )  # fmt: skip
            size, layout = path.stat().st_size, read_layout(path)
            load_sparse(path, self.model)
        own = [row for row in layout if row["tensor"] in self.matrices]
        bits = 8 * sum(row["bytes"] for row in own) / sum(self.matrices.values())
        zeros = sum(int((p == 0).sum()) for name, p in self.model.named_parameters() if name in self.matrices)
        weights = sum(p.numel() for p in self.model.parameters())  # one that is tied counts once, as in the file
        row = {
            "model": self.loaded.path.name, "sparsity": sparsity or 0.0, "rounding": rounding, "values": values,
            "head_values": head or "float32", "zeros_in_matrices": zeros / sum(self.matrices.values()),
            "bytes": size, "of_dense_float32": size / (4 * weights), "of_dense_bfloat16": size / (2 * weights),
            "bits_per_weight_in_matrices": bits, "of_float32_in_matrices": bits / 32,
            "positions": "; ".join(sorted({row["positions"] for row in own})),
        }  # fmt: skip
        row |= {"perplexity": self._perplexity(), "seconds": round(time.perf_counter() - start, 2)}
        self.rows.append(row)
        print(row, flush=True)
        self._save()

    def _plan(self, values: str | None) -> Plan:
        return Plan(
            self.model, method="sparsegpt", data=self.data, samples=None, device=self.device, values=values,
            group_size=self.arguments.group_size,
        )  # fmt: skip

    def _perplexity(self) -> float:
        arguments = self.arguments
        batches = evaluation_batches(
            arguments.test, context=arguments.context, batch_size=arguments.batch, device=self.device,
            vocabulary=self.loaded.vocabulary,
        )  # fmt: skip
        count = max(arguments.test_tokens // (arguments.batch * arguments.context), 1)
        # In float32: the differences of interest are below those of bfloat16.
        return perplexity(self.model, itertools.islice(batches, count))["perplexity"]

    def _save(self) -> None:
        config = {name: value for name, value in vars(self.arguments).items() if name not in ("out", "device")}
        config |= {name: config[name].name for name in ("model", "train", "test")}
        Result(
            experiment="bench_sizes",
            config=config,
            rows=self.rows,
            curves={},
            notes=[],
            environment=environment(str(self.device)),
            seconds=round(time.perf_counter() - self.began, 1),
        ).save(self.arguments.out)


if __name__ == "__main__":
    main()
