"""Studies beyond the paper: a list of points, each trained and pruned, or trained sparse, under one protocol.

The paper fixes alpha at 5. The studies ask what alpha, learning rate, second beta, ``l1`` and pruning method to use,
with AdamW tuned as carefully. :mod:`~horst.lab.experiments.frontier_points` lists their points.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from horst.fields import option
from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.experiments import identity, language_model, mask_methods, vision_model
from horst.lab.experiments import table6_gpt2_one_shot as one_shot
from horst.lab.experiments.frontier_points import LANGUAGE, VISION
from horst.lab.experiments.frontier_processes import side_by_side
from horst.lab.experiments.language_model import LanguageConfig
from horst.lab.experiments.outcomes import broken_down, load_or_run
from horst.lab.experiments.result import Found, Origin, Result, run_and_record, to_json
from horst.lab.experiments.vision_model import VisionConfig, train_sparse_vision_model
from horst.lab.experiments.weight_histogram import weight_spread
from horst.sparsity import find_layers
from horst.training import NonFiniteLoss, World, processes

Device = Literal["auto", "cpu"]
_WHOLE_NUMBERS = ("width", "steps", "epochs", "seeds", "dwf_depth", "sign_in_every")
_WORDS = ("mirror", "no_mirror", "decay", "methods")
_OWN = ("alpha_lr", "beta2", "sparsity", *_WHOLE_NUMBERS, "methods")
_OPTIMIZATION = tuple(field.name for field in dataclasses.fields(Optimization) if field.name != "betas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageStudy:
    """Language models, each trained dense and pruned in one shot.

    Args:
        run: Settings that all points share unless they name another.
        points: Contenders with their settings, such as ``"horst lr=2e-3,8e-3 alpha=5,auto"``; several values are a
            grid. Settings are those of the optimization, ``beta2``, ``alpha_lr`` (alpha times the learning rate),
            ``width``, ``steps``, ``seeds``, and ``methods``, which is one of the pruning methods or ``all`` of them.
            Several kinds of ``no_mirror`` are joined by a plus: ``matrix+embedding``.
        methods: Pruning methods of points with ``methods=all``; other points are pruned by magnitude.
        sparsities: Sparsities of the pruned tensors; the dense model is always there.
        seeds: Seeds of weights and data order.
        directory: Folder of the runs' files; an interrupted study resumes from there.
        workers: Number of processes, one run and one core each.
        device: Device that trains; auto is the GPU where there is one.
    """

    run: LanguageConfig = LanguageConfig()
    points: tuple[str, ...] = option(LANGUAGE, affects="rows")
    methods: tuple[one_shot.PruningMethod, ...] = ("magnitude", "magnitude-global", "sparsegpt", "sparsegpt-global")
    sparsities: tuple[float, ...] = option((0.5, 0.6, 0.7, 0.8), affects="rows")
    seeds: tuple[int, ...] = option((0, 1), affects="rows")
    directory: pathlib.Path = option(pathlib.Path("runs/frontier_language"), affects="nothing")
    workers: int = option(1, affects="nothing")
    device: Device = option("auto", affects="nothing")

    def __post_init__(self) -> None:
        list(points(self))  # a mistake in a point is told now, and not after the first model is trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionStudy:
    """Vision transformers, each trained dense or sparse.

    Args:
        run: Settings that all points share unless they name another.
        points: Contenders with their settings, such as ``"adamw lr=1e-3,3e-3 sparsity=0.9,0"``; several values are a
            grid. Settings are those of the optimization, ``beta2``, ``alpha_lr`` (alpha times the learning rate),
            ``width``, ``epochs``, ``seeds``, ``sparsity`` (0 trains dense), and ``methods``:
            one of :data:`~horst.lab.experiments.mask_methods.Method`.
        sparsity: Sparsity of the masked layers at the end of training, of points that name none.
        seeds: Seeds of weights, data order and augmentation.
        directory: Folder of the runs' files; an interrupted study resumes from there.
        run_workers: Number of processes, one run and one core each (``workers`` is taken: they decode images).
        device: Device that trains; auto is the GPU where there is one.
    """

    run: VisionConfig = VisionConfig()
    points: tuple[str, ...] = option(VISION, affects="rows")
    sparsity: float = 0.9
    seeds: tuple[int, ...] = option((0, 1), affects="rows")
    directory: pathlib.Path = option(pathlib.Path("runs/frontier_vision"), affects="nothing")
    run_workers: int = option(1, affects="nothing")
    device: Device = option("auto", affects="nothing")

    def __post_init__(self) -> None:
        list(points(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a study.

    Args:
        optimizer: Contender.
        run: How it trains.
        seed: Seed of weights, data order and augmentation.
        methods: How the model is pruned, or the one way it is trained sparse.
        sparsity: Sparsity of the masked layers of sparse training; 0 trains dense.
    """

    optimizer: Name
    run: Any
    seed: int
    methods: tuple[Any, ...]
    sparsity: float = 0.0

    @property
    def name(self) -> str:
        """Name of a folder, different for different runs: words for a reader, and eight digits."""
        settings = to_json([identity.settings(self.run, self.optimizer), self.methods, self.sparsity])
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        how = f"{'+'.join(self.methods)}{self.sparsity:g}" if self.sparsity else "dense"
        length = f"steps{self.run.steps}" if isinstance(self.run, LanguageConfig) else how
        label = f"{self.run.optimization.label(self.optimizer)}-lr{self.run.optimization.lr:g}"
        return f"{self.optimizer}-{label}-width{self.run.model.width}-{length}-seed{self.seed}-{digest}"


def grid(text: str) -> tuple[Name, list[dict[str, Any]]]:
    """A contender and its settings, one dictionary per combination of values.

    Raises:
        ValueError: The contender, a setting or a value is none that there is.

    Example:
        >>> grid("horst lr=0.002,0.008 alpha=auto")
        ('horst', [{'lr': 0.002, 'alpha': 'auto'}, {'lr': 0.008, 'alpha': 'auto'}])
    """
    name, *settings = text.split()
    if name not in get_args(Name):
        raise ValueError(f"a point begins with a contender ({', '.join(get_args(Name))}), got {text!r}.")
    axes: dict[str, list[Any]] = {}
    for setting in settings:
        key, _, values = setting.partition("=")
        known = dict.fromkeys((*_OPTIMIZATION, *_OWN))
        if key not in known or not values:
            raise ValueError(f"a setting of a point is KEY=VALUE[,VALUE...] with {', '.join(known)}; got {setting!r}.")
        axes[key] = [_value(key, value) for value in values.split(",")]
    if "alpha" in axes and "alpha_lr" in axes:
        raise ValueError(f"a point has alpha or alpha_lr, which decides alpha, not both; got {text!r}.")
    found = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return name, found  # type: ignore[return-value]


def points(config: LanguageStudy | VisionStudy) -> Iterator[Point]:
    """The runs of a study, in the order of its points."""
    language = isinstance(config, LanguageStudy)
    usual = "magnitude" if language else "acdc"
    for text in config.points:
        name, combinations = grid(text)
        for settings in combinations:
            method = settings.pop("methods", usual)
            asked = settings.pop("sparsity", getattr(config, "sparsity", 0.0))
            seeds = [settings.pop("seeds")] if "seeds" in settings else config.seeds
            methods = config.methods if isinstance(config, LanguageStudy) and method == "all" else (method,)
            if not set(methods) <= set(get_args(one_shot.PruningMethod if language else mask_methods.Method)):
                raise ValueError(f"methods of a point must be known ones, got {method!r} in {text!r}.")
            run = _changed(config.run, settings)
            for seed in seeds:
                yield Point(optimizer=name, run=run, seed=seed, methods=methods, sparsity=0.0 if language else asked)


def run(config: LanguageStudy | VisionStudy, name: str = "frontier_language") -> Result:
    """Train and prune every point, each once; rows by run and level."""
    origins: list[Origin] = []
    calls: dict[str, tuple[Any, ...]] = {}
    for point in points(config):
        calls.setdefault(point.name, (point, getattr(config, "sparsities", ()), config.directory, config.device))
    language = isinstance(config, LanguageStudy)

    def body() -> Found:
        workers = config.workers if isinstance(config, LanguageStudy) else config.run_workers
        found = side_by_side(run_point, calls, workers)
        origins.extend(each["origin"] for each in found)
        which = "the dense model's weights in the blocks" if language else "the weights in the blocks that are not zero"
        notes = [f"largest, std and kurtosis are those of {which}."]
        return [row for each in found for row in each["rows"]], {}, notes

    device = "cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu"
    words = language_model.in_words if language else vision_model.in_words
    return run_and_record(name, config, body, device, origins, words(config.run))  # type: ignore[arg-type]


def run_point(point: Point, sparsities: tuple[float, ...], directory: pathlib.Path, device: Device) -> dict[str, Any]:
    """The rows of one run and their origin, from its file if it was done before.

    A run that breaks down has rows without numbers.
    """
    where = directory / point.name
    language = isinstance(point.run, LanguageConfig)
    with processes(device) as world:
        found = _train_and_prune(point, sparsities, where, world) if language else _train_sparse(point, where, world)
    length = "steps" if language else "epochs"
    shape = {"width": point.run.model.width, length: getattr(point.run, length), "seed": point.seed}
    about = {**about_optimizer(point.optimizer, point.run.optimization), **shape}
    return {"rows": [{**row, **about} for row in found["rows"]], "origin": found["origin"]}


def about_optimizer(optimizer: Name, optimization: Optimization) -> dict[str, Any]:
    """What a row says of its optimizer.

    ``strength`` is what the contender is tuned by: ``alpha * lr`` of a mirror step, Muon's learning rate over ``lr``,
    the l1, penalty or decay of the others. With ``alpha="auto"``, ``alpha_lr`` and ``strength`` are left open.
    """
    about = optimization.about(optimizer)
    alpha_lr = None if about["alpha"] == "auto" else about["alpha"] * optimization.lr
    own = {
        "muon": optimization.muon_lr_ratio,
        "adamw-penalty": optimization.penalty,
        "adamw-l1": optimization.l1,
        "horst-l1": optimization.l1,
        "muon-l1": optimization.l1,
        "muon-l1-horst": optimization.l1,
        "horst-muon-l1": optimization.l1,
        "spred": optimization.spred_decay,
    }
    return {
        **about,
        "alpha_lr": alpha_lr,
        "strength": own.get(optimizer, alpha_lr),
        "lr": optimization.lr,
        "beta2": optimization.betas[1],
        "weight_decay": optimization.weight_decay,
        "decay": optimization.decay,
        "mirror": optimization.mirror + ", not " * bool(optimization.no_mirror) + ", ".join(optimization.no_mirror),
    }


def _value(key: str, value: str) -> Any:
    if key in _WORDS or (key == "alpha" and value == "auto"):
        return tuple(value.split("+")) if key == "no_mirror" else value
    try:
        return int(value) if key in _WHOLE_NUMBERS else float(value)
    except ValueError as error:
        raise ValueError(f"{key} of a point must be a number, got {value!r}.") from error


def _changed(run: Any, settings: dict[str, Any]) -> Any:
    """``run`` with the settings of a point; the warm-up grows with the steps."""
    rest = dict(settings)
    own: dict[str, Any] = {name: rest.pop(name) for name in ("steps", "epochs") if name in rest}
    if "steps" in own:
        own["warmup_steps"] = round(run.warmup_steps * own["steps"] / run.steps)
    if "width" in rest:
        own["model"] = dataclasses.replace(run.model, width=rest.pop("width"))
    if "beta2" in rest:
        rest["betas"] = (run.optimization.betas[0], rest.pop("beta2"))
    if "alpha_lr" in rest:
        rest["alpha"] = float(f"{rest.pop('alpha_lr') / rest.get('lr', run.optimization.lr):.9g}")
    return dataclasses.replace(run, optimization=dataclasses.replace(run.optimization, **rest), **own)


def _train_and_prune(point: Point, sparsities: tuple[float, ...], where: pathlib.Path, world: World) -> dict[str, Any]:
    config = one_shot.Config(run=point.run, sparsities=sparsities, methods=point.methods, prune_layers="blocks")
    found = one_shot.one_run(config, point.optimizer, point.seed, world, where)
    if "spread" in found:  # it did not break down
        more = {**found["spread"], "seconds": found["training"]["seconds"]}
        found["rows"] = [{**row, **more} for row in found["rows"]]
    return found


def _train_sparse(point: Point, where: pathlib.Path, world: World) -> dict[str, Any]:
    (method,) = point.methods
    run = (point.run, point.optimizer, point.sparsity, point.seed)

    def compute() -> dict[str, list[dict[str, Any]]]:
        level = {"method": method if point.sparsity else "dense", "sparsity": point.sparsity}
        try:
            model, trained, _ = train_sparse_vision_model(*run, where, world, method)
        except NonFiniteLoss as error:
            return {"rows": [{**level, "top1": None, "loss": None, **broken_down(error)}]}
        weights = [layer.param for layer in find_layers(model, "blocks")]
        row = {
            **level,
            "top1": trained.metrics["top1"],
            "loss": trained.metrics["loss"],
            "zeros": sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights),
            **weight_spread(weights, nonzero=True),
            "seconds": trained.seconds,
        }
        return {"rows": [row]}

    identity = vision_model.run_identity(*run, method)
    return load_or_run(where / "outcome.json", identity, compute, str(world.device))
