"""One run of a comparison: trained and pruned, or trained sparse; and what its optimizer keeps in memory."""

from __future__ import annotations

import functools
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horst.files import read_json
from horst.lab.experiments import language_model, vision_model
from horst.lab.experiments.frontier import Device, Point, run_point
from horst.lab.experiments.language_model import LanguageConfig
from horst.lab.experiments.mask_methods import SparseRun, make_sparsifier
from horst.lab.experiments.outcomes import broken_down, load_or_run
from horst.lab.experiments.result import environment, to_json
from horst.lab.experiments.vision_model import open_source, train_sparse_vision_model
from horst.lab.models.deit import build_deit
from horst.lab.models.gpt2 import GPT2
from horst.pruning import sweep
from horst.sparsity import find_layers
from horst.training import NonFiniteLoss, World, accuracy, processes

ONE_SHOT = "one-shot"
_STEPS = 100  # of an epoch, where only the size of the masks matters


def attempt(point: Point, levels: Sequence[float], directory: pathlib.Path, device: Device) -> dict[str, Any]:
    """The rows of one run and their origin, from its file if it was done before.

    A run that breaks down has rows without numbers. One that ends with an error has a row that says so and leaves no
    file: the table goes on without it, and the next time it is tried again.

    Args:
        point: Contender, its settings and its seed.
        levels: Sparsities after training; of sparse training, the point has its own.
        directory: Folder of the runs.
        device: Device that trains.
    """
    language = isinstance(point.run, LanguageConfig)
    try:
        if language:
            return run_point(point, tuple(levels), directory, device)
        with processes(device) as world:
            return _train_vision(point, levels, directory / point.name, world)
    except Exception as error:  # one contender's, whatever it is, must not cost the others their rows
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        missing = {"method": "dense", "sparsity": 0.0, "perplexity" if language else "top1": None, "broke_down": reason}
        return {"rows": [missing], "origin": {"environment": environment(), "seconds": 0.0}}


def is_done(point: Point, directory: pathlib.Path) -> bool:
    """Whether the run has left an outcome, with these settings and on these data."""
    path = directory / point.name / "outcome.json"
    if not path.is_file():
        return False
    try:
        saved = read_json(path)["config"]
    except (ValueError, KeyError):  # damaged, as a run that goes on would say
        return False
    if isinstance(point.run, LanguageConfig):
        wanted = language_model.run_identity(point.run, point.optimizer, point.seed)
    else:
        wanted = vision_model.run_identity(point.run, point.optimizer, point.sparsity, point.seed, *point.methods)
    return {**saved, **to_json(wanted)} == saved


def _train_vision(point: Point, levels: Sequence[float], where: pathlib.Path, world: World) -> dict[str, Any]:
    (method,) = point.methods
    run = (point.run, point.optimizer, point.sparsity, point.seed)
    way = method if point.sparsity else ONE_SHOT

    def compute() -> dict[str, Any]:
        try:
            model, trained, _ = train_sparse_vision_model(*run, where, world, method)
        except NonFiniteLoss as error:
            asked = [point.sparsity] if point.sparsity else [0.0, *levels]
            return {"rows": [{"method": way, "sparsity": s, "top1": None, **broken_down(error)} for s in asked]}
        source = open_source(point.run, point.seed, world)
        evaluate = functools.partial(_accuracy, source, point.run.loop.precision)
        if point.sparsity:
            found = [{"method": way, "sparsity": point.sparsity, **_zeros(model), **evaluate(model)}]
        else:
            found = sweep(model, levels, evaluate=evaluate, layers=point.run.layers)
            found = [{**row, "method": way if row["sparsity"] else "dense"} for row in found]
        return {"rows": [{**row, "seconds": trained.seconds, "steps": trained.step} for row in found]}

    settings = {**vision_model.run_identity(*run, method), "pruned once to": [] if point.sparsity else list(levels)}
    found = load_or_run(where / "outcome.json", settings, compute, str(world.device))
    return {**found, "rows": [{**row, "seed": point.seed} for row in found["rows"]]}


def _accuracy(source: Any, precision: Any, model: nn.Module) -> dict[str, float]:
    return dict(accuracy(model, source.evaluation_batches(), precision=precision))


def _zeros(model: nn.Module) -> dict[str, float]:
    """Actual zeros among the weights that masks are for, and among all."""
    masked = [layer.param for layer in find_layers(model, "blocks")]
    return {"sparsity_of_pruned_layers": _share(masked), "sparsity_of_all_weights": _share(list(model.parameters()))}


def _share(tensors: Sequence[Tensor]) -> float:
    return sum(int((tensor == 0).sum()) for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def bytes_per_weight(point: Point) -> float:
    """What a contender keeps beside weights and gradients, in bytes per weight of the plain model.

    That is what a checkpoint holds after one step of the optimizer's state, of the masks and of parameters that the
    contender adds to the model.
    """
    torch.manual_seed(0)
    run, shape = point.run, point.run.model
    if isinstance(run, LanguageConfig):
        model: nn.Module = GPT2(shape)
        tokens = torch.randint(shape.vocabulary, (1, shape.context + 1))
        batch: tuple[Tensor, ...] = (tokens[:, :-1], tokens[:, 1:])
        length, masks = run.steps, SparseRun(sparsity=0.0, epochs=1, steps_per_epoch=run.steps)
    else:
        model = build_deit(shape)
        batch = (torch.randn(1, shape.channels, shape.image_size, shape.image_size),)
        masks = SparseRun(sparsity=point.sparsity, epochs=run.epochs, steps_per_epoch=_STEPS, layers=run.layers)
        length = masks.steps
    weights, plain = sum(p.numel() for p in model.parameters()), _bytes(list(model.parameters()))
    optimizer = run.optimization.make(model, point.optimizer, steps=length)
    sparsifier = run.optimization.masks(model, optimizer, point.optimizer)
    if sparsifier is None and point.sparsity:
        sparsifier = make_sparsifier(point.methods[0], model, optimizer, masks)
    loss = model.loss(*batch) if isinstance(model, GPT2) else model(*batch).square().mean()
    loss.backward()
    kept = []
    with warnings.catch_warnings():  # SAFE wants a second backward pass, which changes no size
        warnings.filterwarnings("ignore", message="sam_radius=")
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step()
            kept.append(sparsifier.state_dict())
            sparsifier.close()
    kept.append(optimizer.state_dict())
    return (_bytes(kept) + _bytes(list(model.parameters())) - plain) / weights


def _bytes(kept: Any) -> int:
    """Size of the tensors in nested lists and dictionaries."""
    if isinstance(kept, Tensor):
        return kept.numel() * kept.element_size()
    entries = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, (list, tuple)) else ()
    return sum(map(_bytes, entries))
