"""``horst bench``: the optimizer's step, pruning and the forms of a pruned model, timed on this machine.

A short look at a GPT-2 of the size you name. The scripts in the repository's ``benchmarks/`` measure more, and wrote
the numbers of the documentation.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.output import table, write, write_json
from horst.cli.parsing import check_seconds
from horst.cli.progress import quiet, spinner

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from horst.lab.models.gpt2 import GPT2

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The parts to time, and the size of the model."""

    only: tuple[Literal["step", "pruning", "export"], ...] = ("step", "pruning", "export")
    """Parts to time."""
    layers: int | None = None
    """Blocks of the GPT-2; by default 12 on a GPU and 4 on a CPU."""
    width: int | None = None
    """Width of the GPT-2, a multiple of 64; by default 768 on a GPU and 256 on a CPU."""
    context: int = 128
    """Tokens per sequence."""
    samples: int = 16
    """Sequences to calibrate pruning on."""
    seconds: float = 3.0
    """Duration of timing the step, and the forms."""
    device: str | None = None
    """Device; by default the GPU if there is one."""
    json: bool = False
    """Print JSON instead of tables."""


def main(options: Options) -> None:
    """Build the model, time what was asked for."""
    import torch

    from horst.cli.models import choose_device
    from horst.lab.experiments.result import environment
    from horst.lab.models.gpt2 import GPT2, GPT2Config

    check_seconds(options.seconds)
    device = choose_device(options.device)
    small = device.type == "cpu"
    width = (256 if small else 768) if options.width is None else options.width
    if width < 64 or width % 64 or options.samples < 1:
        raise ValueError(
            f"--width must be a positive multiple of 64 and --samples at least 1, got {width} and {options.samples}."
        )
    torch.manual_seed(0)
    shape = GPT2Config(
        layers=(4 if small else 12) if options.layers is None else options.layers,
        heads=width // 64,
        width=width,
        context=options.context,
        vocabulary=8192 if small else 50304,
    )
    model = GPT2(shape).to(device).eval()
    rows: dict[str, list[Row]] = {}
    for what in options.only:
        with spinner(what), quiet("horst.export"):
            rows[what] = BENCHES[what](model, options, device)
    size = f"GPT-2 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters on {device}"
    if options.json:
        write_json({"model": dataclasses.asdict(shape), "environment": environment(str(device)), **rows})
        return
    write("\n\n".join([size, *(table(found, what.capitalize()) for what, found in rows.items())]))


def time_step(model: GPT2, options: Options, device: torch.device) -> list[Row]:
    """HORST and AdamW on the same tensors, in turns; each step is waited for."""
    import torch

    from horst import HORST
    from horst.cli.doctor import try_backends
    from horst.export.cpu_kernels import interleaved_times

    wrong = [row for row in try_backends(device.type == "cuda") if row["why not"].startswith("its result differs")]
    if wrong:
        raise RuntimeError(
            f"nothing is timed: {wrong[0]['backend']} on {wrong[0]['device']} gives wrong results. See horst doctor."
        )
    weights = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p in weights:
        p.grad = torch.randn_like(p).mul_(1e-3)
    makers: dict[str, Callable[[], Optimizer]] = {
        "AdamW fused": lambda: torch.optim.AdamW(weights, fused=True),
        "AdamW foreach": lambda: torch.optim.AdamW(weights, foreach=True),
        "HORST (default)": lambda: HORST(weights),
        "HORST foreach": lambda: HORST(weights, foreach=True),
    }
    calls = {name: _synchronized(make().step, device) for name, make in makers.items()}
    times = interleaved_times(calls, seconds=options.seconds)
    found = {name: statistics.median(taken) for name, taken in times.items()}
    fused = found["AdamW fused"]
    return [{"optimizer": n, "milliseconds": 1e3 * s, "x AdamW fused": s / fused} for n, s in found.items()]


def time_pruning(model: GPT2, options: Options, device: torch.device) -> list[Row]:
    """Each method once, to a half, on random tokens."""
    import torch

    from horst.pruning import prune

    tokens = torch.randint(model.config.vocabulary, (options.samples, model.config.context), device=device)
    rows = []
    for method in ("magnitude", "wanda", "sparsegpt"):
        pruned = copy.deepcopy(model)
        begin = time.perf_counter()
        report = _synchronized(lambda: prune(pruned, 0.5, method=method, data=tokens.split(8)), device)()  # noqa: B023
        rows.append({"method": method, "seconds": time.perf_counter() - begin, "zeros": report.zeros})
    return rows


def time_export(model: GPT2, options: Options, device: torch.device) -> list[Row]:
    """Dense against the other forms at 90 %, one sequence per call."""
    import torch

    from horst.export import compare
    from horst.pruning import prune

    pruned = copy.deepcopy(model)
    prune(pruned, 0.9)
    tokens = torch.randint(model.config.vocabulary, (1, model.config.context), device=device)
    forms = ["sparse-safetensors", "sparse-linear"] if device.type == "cpu" else ["sparse-safetensors"]
    return compare(pruned, tokens, forms=forms, seconds=options.seconds).rows


BENCHES: dict[str, Callable[[GPT2, Options, torch.device], list[Row]]] = {
    "step": time_step,
    "pruning": time_pruning,
    "export": time_export,
}


def _synchronized(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    import torch

    def call_and_wait() -> Any:
        result = call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return result

    return call_and_wait
