"""``horst sparsify MODEL --data TEXT --sparsity S --out DIRECTORY``: prune a model and train it further."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.destination import beside, check_free, replaced
from horst.cli.output import table, write, write_json
from horst.cli.parsing import read_pattern
from horst.cli.progress import quiet, spinner

if TYPE_CHECKING:
    from horst.cli.models import LoadedModel
    from horst.cli.recovery_data import RecoveryData
    from horst.lab.experiments.result import Result
    from horst.recovery import SparsifyConfig
    from horst.training import World

RECORD, PAGE = "sparsify.json", "sparsify.html"
_AMOUNTS = {"k": 10**3, "M": 10**6, "B": 10**9, "": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The model, the data, how sparse, and the directory to make."""

    model: Path
    """The model: a directory of Hugging Face or timm, or of a finished run."""
    data: str = ""
    """Needed. Text: .txt, .jsonl, .parquet, a folder of horst data, wikitext, hub:owner/name. Images: digits, .npz, a
    folder of CIFAR-10 or with train and val."""
    sparsity: float | None = None
    """Share of the weights of the pruned layers that become zero: 0.7, not 70. An N:M pattern fixes it."""
    pattern: str | None = None
    """Pattern of the zeros: by default single weights; 2:4 or any N:M; or blocks, as 4x4."""
    out: Path | None = None
    """Directory to make; by default next to the model, with the sparsity in its name."""
    eval_data: str | None = None
    """Data to judge by; by default 2 % of the rows of --data, at most 256, which are not trained on."""
    tokens: str | None = None
    """Tokens to train on, such as 20M; by default one pass over the data. For text."""
    steps: int | None = None
    """Optimizer steps, in place of --tokens."""
    method: Literal["sparsegpt", "wanda", "magnitude"] = "sparsegpt"
    """Rule that chooses the weights to remove."""
    distribution: Literal["uniform", "global"] = "uniform"
    """Division of the zeros among the layers: the same share in each, or one threshold, for a model trained with l1."""
    stages: tuple[float, ...] | None = None
    """Sparsities on the way; by default none up to 60 %, and a few beyond."""
    train: Literal["fixed", "refresh", "admm", "ast", "cast"] = "fixed"
    """What becomes of the masks while training: they stay, or are chosen anew; or one of three methods that go from
    dense to sparse by themselves."""
    sam_radius: float = 0.0
    """Length of SAM's ascent step with --train admm (SAFE): 2e-4 on text, 0.1 on images; 0 for none."""
    optimizer: Literal["horst", "adamw", "adams"] = "horst"
    """Optimizer of the training; adams is for --train cast, and for nothing else."""
    lr: float = 3e-4
    """Peak of the learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices."""
    alpha: float | Literal["auto"] = 5.0
    """Strength of HORST's mirror step."""
    l1: float = 0.0
    """HORST's soft threshold on the matrices in the blocks."""
    distill: Literal["kl", "squarehead", "none"] | None = None
    """What pulls the model towards the dense one: by default its predictions (kl); for an encoder its hidden states."""
    teacher: Path | None = None
    """Another model to learn from; by default the dense one."""
    lora: int | None = None
    """Rank of adapters that are trained instead of the weights, and merged without filling a zero."""
    batch_size: int = 32
    """Rows per step, over all processes."""
    accumulate: int = 1
    """Parts of a batch that are computed one after the other, to save memory."""
    context: int | None = None
    """Tokens per row; by default the model's, at most 2048 (128 for an encoder)."""
    samples: int | None = None
    """Rows that calibrate the choice of the weights; by default 128, and 64 on a CPU."""
    layers: Literal["blocks", "paper", "all_linear", "all"] = "blocks"
    """Layers to prune: those in the blocks; all blocks but the first and last (paper); all linear; all."""
    include: tuple[str, ...] = ()
    """Wildcard patterns of further parameters to prune."""
    exclude: tuple[str, ...] = ()
    """Wildcard patterns of parameters to leave alone."""
    tokenizer: Literal["auto", "gpt2", "bytes"] = "auto"
    """For text: auto is the model's own."""
    precision: Literal["bf16", "float32"] | None = None
    """Precision of the training: bf16 under autocast, by default on a GPU; float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: by default on a GPU."""
    gradient_checkpointing: bool = False
    """Compute activations twice, to save memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: whole copies (ddp) or shards (fsdp)."""
    eval_every: int | None = None
    """Steps between two evaluations; by default a quarter of the shortest stage."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; by default a quarter of the shortest stage."""
    seed: int = 0
    """Seed of the order of the data."""
    sparse: bool = False
    """Write model.sparse.safetensors, a smaller file, in place of model.safetensors with zeros in it."""
    device: str | None = None
    """Device to compute on; by default the GPU if there is one."""
    overwrite: bool = False
    """Replace an existing directory, if horst made it; discard an interrupted run with other settings."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: Options) -> None:
    """Evaluate, prune, train, check, evaluate; save the model with a record and a page."""
    from horst.cli.models import choose_device, load_model
    from horst.recovery import SparsifyConfig
    from horst.training import processes

    if not options.data:
        raise ValueError("give the data to train on: --data text.jsonl, or --data digits for images.")
    if options.sparsity is None and options.pattern is None:
        raise ValueError("give the share of weights to remove, --sparsity 0.7, or a pattern, --pattern 2:4.")
    same = {field.name for field in dataclasses.fields(SparsifyConfig)} & set(vars(options)) - {"pattern", "samples"}
    given = {name: getattr(options, name) for name in same} | {
        "pattern": read_pattern(options.pattern),
        "tokens": _count(options.tokens),
    }
    _refuse_without_effect(options)
    SparsifyConfig(**given)  # what cannot work is refused before anything is read
    amount = options.pattern.replace(":", "-") if options.pattern else f"{100 * (options.sparsity or 0):g}"
    out = options.out or beside(options.model, amount)
    sources: list[str | Path] = [options.model, options.data]
    sources += [source for source in (options.eval_data, options.teacher) if source is not None]
    check_free(out, options.overwrite, "directory", sources)
    device = choose_device(options.device)
    with processes("cpu" if device.type == "cpu" else "auto") as world:
        world = dataclasses.replace(world, device=device) if world.size == 1 else world
        if options.parallel == "fsdp" and world.size == 1:
            raise ValueError(
                "--parallel fsdp divides the model among several processes, and there is one. Start them with torchrun "
                "--nproc-per-node 2 -m horst.cli sparsify ..., or leave --parallel out."
            )
        loaded = load_model(options.model)
        teacher = None if options.teacher is None else load_model(options.teacher).model.to(world.device)
        data, config = _prepare(options, given, loaded, world)
        state = out.with_name(f".{out.name}.sparsify")
        loaded.model.to(world.device)
        result = _run(options, loaded, teacher, data, config, state, world)
        _finish(options, loaded, result, out, state, world)


def _refuse_without_effect(options: Options) -> None:
    """Options that another one makes meaningless."""
    own_masks = options.train in ("admm", "ast", "cast")
    if options.method != Options.method and own_masks:
        raise ValueError(
            f"--method {options.method} has no effect with --train {options.train}, which chooses by magnitude itself. "
            "Leave --method out."
        )
    if options.samples is not None and (own_masks or options.method == "magnitude"):
        chooser = f"--train {options.train}" if own_masks else "--method magnitude"
        raise ValueError(
            f"--samples {options.samples} has no effect with {chooser}, which needs no calibration. Leave it out, or "
            "use --method sparsegpt or wanda with --train fixed or refresh."
        )


def _count(amount: str | None) -> int | None:
    """A number with k, M or B behind it.

    Example:
        >>> _count("20M"), _count("1.5k"), _count("300")
        (20000000, 1500, 300)
    """
    if amount is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMB]?)", amount)
    if not found or float(found[1]) * _AMOUNTS[found[2]] < 1:
        raise ValueError(f"--tokens must be a number such as 500k, 20M or 1B, got {amount!r}.")
    return round(float(found[1]) * _AMOUNTS[found[2]])


def _prepare(
    options: Options, given: dict[str, Any], loaded: LoadedModel, world: World
) -> tuple[RecoveryData, SparsifyConfig]:
    """The data and the settings, with all that was left to us."""
    from horst.cli.recovery_data import read_data
    from horst.cli.texts import CPU_SAMPLES, SAMPLES
    from horst.recovery import SparsifyConfig
    from horst.training import LoopConfig
    from horst.training.evaluate import usual_precision

    cpu = world.device.type == "cpu"
    precision = options.precision or usual_precision(world.device)
    with spinner("reading the data"):
        data = read_data(
            options.data, options.eval_data, loaded, context=options.context, tokenizer=options.tokenizer,
            batch_size=options.batch_size, device=world.device, precision=precision,
        )  # fmt: skip
    steps = options.steps
    if steps is None and given["tokens"] is None:
        steps = given["steps"] = data.steps_per_epoch(options.batch_size)
    if steps is None and loaded.reads == "images":
        raise ValueError("--tokens counts tokens of text, and this model reads images: use --steps.")
    planned = steps or math.ceil(given["tokens"] / (data.tokens_per_row * options.batch_size))
    stages = (
        (planned,) if options.train in ("admm", "ast", "cast") else SparsifyConfig(**given).steps_of_stages(planned)
    )
    every = max(1, min(stages) // 4)
    loop = LoopConfig(
        precision=precision,
        compile="off" if cpu and options.compile == "auto" else options.compile,
        accumulate=options.accumulate,
        clip_norm=1.0,
        eval_every=options.eval_every or every,
        log_every=min(50, every),
        checkpoint_every=options.checkpoint_every or every,
    )
    samples = options.samples or (CPU_SAMPLES if cpu else SAMPLES)
    if world.rank == 0:
        _announce(data, planned, options.batch_size)
    return data, SparsifyConfig(**given, samples=samples, loop=loop)


def _announce(data: RecoveryData, steps: int, batch_size: int) -> None:
    """Say what is trained on and for how long, and warn of too little text."""
    from horst.lab.report.sparsify import doubts_of

    passes = data.passes(steps, batch_size)
    plan = f"training for {steps:,} {'step' if steps == 1 else 'steps'} of {batch_size} rows"
    if data.judged_on is not None:
        plan += f": {steps * batch_size * data.tokens_per_row:,} tokens, {passes:.2g} times this text"
    doubts = doubts_of(data.judged_on, passes)
    write("\n".join([data.about, plan, *filter(None, [doubts])]), sys.stderr)


def _run(
    options: Options,
    loaded: LoadedModel,
    teacher: Any,
    data: RecoveryData,
    config: SparsifyConfig,
    state: Path,
    world: World,
) -> Result:
    """Make the model sparse; what was found, as every experiment records it."""
    from horst.lab.experiments.result import run_and_record
    from horst.recovery import sparsify
    from horst.recovery.progress import AnotherRun
    from horst.training.distributed import on_rank_0

    settings = {"evaluate": data.evaluate, "teacher": teacher, "directory": state, "config": config}

    def body() -> Any:
        try:
            report = sparsify(loaded.model, data.train, **settings)
        except AnotherRun as other:  # found before anything is computed
            if not options.overwrite:
                raise FileExistsError(
                    f"{state} holds an interrupted run: {other.words}. Give {other.back} to go on, another --out, or "
                    "--overwrite to begin anew."
                ) from other
            on_rank_0(lambda: _discard(state))
            report = sparsify(loaded.model, data.train, **settings)
        found = report.to_dict()
        curve = [_lines(state / f"stage-{number}" / "metrics.jsonl") for number in range(1, len(report.stages) + 1)]
        curves = {"layers": found["layers"], "training": curve, "metric": data.metric, "unit": found["unit"]}
        curves |= {"higher_is_better": data.higher_is_better, "settings": found["settings"]}
        trained = sum(stage.steps for stage in report.stages)
        curves |= {"judged_on": data.judged_on, "passes": data.passes(trained, config.batch_size)}
        shares = {key: found[key] for key in found if key.startswith("sparsity_of")}
        rows = [{**{k: v for k, v in row.items() if k != "metrics"}, **row["metrics"]} for row in report.rows()]
        rows[-1] |= shares
        return rows, curves, []

    about = f"{type(loaded.model).__name__} from {loaded.path.name}; {data.about}"
    return run_and_record("sparsify", config, body, str(world.device), setting=about)


def _discard(state: Path) -> None:
    """Delete what an interrupted run has left, and nothing else."""
    from horst.recovery.progress import Progress

    ours = re.compile(rf"stage-\d+|{re.escape(Progress.FILE)}|\..*")
    if foreign := sorted(path.name for path in state.iterdir() if not ours.fullmatch(path.name)):
        raise FileExistsError(
            f"{state} holds {foreign[0]}, which horst did not write. Move it away, or choose another --out."
        )
    shutil.rmtree(state)
    write(f"the interrupted run in {state} is discarded", sys.stderr)


def _finish(options: Options, loaded: LoadedModel, result: Result, out: Path, state: Path, world: World) -> None:
    """Write the directory, and say what came of it."""
    from horst.lab.report.sparsify import stages_table, words
    from horst.training.distributed import is_sharded, on_rank_0

    if is_sharded(loaded.model):
        loaded = _whole(loaded)
    on_rank_0(lambda: _save(options, loaded, result, out))
    if world.rank == 0:
        shutil.rmtree(state, ignore_errors=True)
        if options.json:
            write_json({"out": str(out), "rows": result.rows, "layers": result.curves["layers"]})
        else:
            page = f", {out / PAGE}" if (out / PAGE).exists() else ""
            write(f"{table(stages_table(result).records())}\n{words(result)}\n-> {out}{page}")
            if options.sparse:
                write(loaded.how_to_load(out))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _whole(loaded: LoadedModel) -> LoadedModel:
    """The model in one piece, of one that is cut over the ranks."""
    from horst.cli.models import load_model
    from horst.recovery import gathered
    from horst.training.run_state import load_tensors, named_tensors

    weights = gathered(loaded.model)
    fresh = load_model(loaded.path)
    load_tensors(named_tensors(fresh.model), weights)
    return fresh


def _save(options: Options, loaded: LoadedModel, result: Result, out: Path) -> None:
    from horst.lab.report import html

    with quiet("horst.export"), replaced(out, options.overwrite) as directory:  # its log names temporary files
        loaded.save(directory, sparse=options.sparse)
        record = result.save(directory / RECORD)
        try:
            html.build([record], directory / PAGE)
        except Exception as error:  # hours of training are not lost for a drawing
            write(f"the page could not be drawn: {type(error).__name__}: {error}. The model is saved.", sys.stderr)
