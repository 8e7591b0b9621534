"""One-shot pruning of a model: layers, pattern, distribution, method and data put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from horst.parameters.modes import Batch
from horst.parameters.quantization import GROUP_SIZE, Grid, parse_values
from horst.parameters.sharding import Shard
from horst.pruning.batches import read_batches
from horst.pruning.calibration import calibrate
from horst.pruning.chains import block_sequences, layers_by_block, outer_blocks
from horst.pruning.magnitude import Magnitude
from horst.pruning.method import Method, Prepared, Statistic
from horst.pruning.owl import OWL
from horst.pruning.report import PrunedLayer, Report
from horst.pruning.sparsegpt import SparseGPT
from horst.pruning.wanda import InputNorms, Wanda, wanda_scores
from horst.sparsity import find_layers
from horst.sparsity.distributions import Distribution, allocate, check_ratios
from horst.sparsity.layers import Layer, Preset, check_model, left_dense
from horst.sparsity.masks import NM, Block, Pattern, check_sparsity, parse_pattern
from horst.sparsity.selection import FLOATS, smallest, warn_of_non_finite
from horst.user_warnings import warn_user

logger = logging.getLogger(__name__)

# A tensor that loses this share, while the model is to lose less than _HIGH, is emptied rather than pruned.
_EMPTIED, _HIGH = 0.99, 0.9

METHODS: dict[str, type[Method]] = {"magnitude": Magnitude, "wanda": Wanda, "sparsegpt": SparseGPT}


def prune(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    method: str | Method | None = None,
    data: Iterable[Batch] | None = None,
    pattern: Pattern = None,
    distribution: Distribution | Literal["owl"] | OWL = "uniform",
    layers: Preset | Literal["paper"] | None = "blocks",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    samples: int | None = 128,
    sequential: bool = True,
    device: torch.device | str | None = None,
    values: str | None = None,
    group_size: int = GROUP_SIZE,
) -> Report:
    """Prune a model in place, in one shot.

    The model keeps its classes, dtypes and devices; pruned weights are zeros. If an error ends it half way, the blocks
    before are pruned already.

    Args:
        model: Any module. Methods that need data go through its repeated blocks one by one
            (:mod:`horst.pruning.calibration`).
        sparsity: Share of zeros in [0, 1); None where N:M or a mapping of sparsities fixes it.
        method: Method: ``"magnitude"``, ``"wanda"`` or ``"sparsegpt"``; or an instance of :class:`Magnitude`,
            :class:`Wanda`, :class:`SparseGPT` with options of its own. None is magnitude, and refuses ``data`` that it
            would not read.
        data: Batches as the model takes them: a tensor, a tuple or list of arguments, or a mapping of keyword
            arguments. Magnitude does not read it, unless the distribution is OWL.
        pattern: Pattern of the mask: None (single weights), ``"2:4"`` or any N:M, or ``(rows, columns)`` of blocks of
            an out x in matrix.
        distribution: Division of the zeros: ``"uniform"``, ``"global"``, ``"erk"``, ``"owl"`` or an :class:`OWL`; or a
            mapping from layer names, prefixes or wildcards to sparsities. With ``"global"``, one threshold on the dense
            model's magnitudes, for Wanda on its scores, says how many weights each layer loses. It can empty a layer
            with small weights, and then warns. With ``"owl"``, the magnitudes say it, or Wanda's scores where there are
            data.
        layers: ``"blocks"``, ``"all_linear"``, ``"all"`` or None, see :mod:`horst.sparsity.layers`; or ``"paper"``,
            the linear weights of all blocks but the first and the last. Frozen weights count too.
        include: Wildcard patterns of parameter names to add.
        exclude: Wildcard patterns to leave out.
        samples: Number of samples to read from ``data``, in whole batches; None reads all.
        sequential: Whether a block is calibrated on what the pruned blocks before it return (as the reference codes
            do) or on what the dense ones do (one pass less through each block).
        device: Device to compute on, one block at a time; None is where the model is.
        values: Precision to round the kept weights to: ``"int8"``, ``"int4"``, ``"int3"``, ``"int2"``, ``"bfloat16"``
            or None. The model keeps its dtype; :func:`horst.export.save_sparse` with the same ``values`` stores these
            weights without further loss. SparseGPT rounds to integers while it prunes, so that the columns to the right
            make up for the rounding, too; with ``sparsity=0`` it rounds alone, and zeros stay zeros. Other methods
            round to the nearest afterwards.
        group_size: Consecutive inputs of a row that share a scale, for integers.

    Returns:
        The sparsity, and where known the error, of each layer.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        >>> report = prune(model, 0.5, method="wanda", data=[torch.randn(16, 8)])
        >>> [(layer.name, layer.kept) for layer in report.layers]
        [('0.0.weight', 32), ('1.0.weight', 32), ('2.0.weight', 32)]
    """
    plan = Plan(
        model, method=method, data=data, pattern=pattern, distribution=distribution, layers=layers, include=include,
        exclude=exclude, samples=samples, device=device, values=values, group_size=group_size,
    )  # fmt: skip
    return plan.prune(sparsity, sequential=sequential)


@dataclass(eq=False)
class Plan:
    """What :func:`prune` and :func:`horst.pruning.sweep` share: the arguments of :func:`prune`, checked and read."""

    model: nn.Module
    method: str | Method | None = None
    data: Iterable[Batch] | None = None
    pattern: Pattern = None
    distribution: Distribution | Literal["owl"] | OWL = "uniform"
    layers: Preset | Literal["paper"] | None = "blocks"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    samples: int | None = 128
    device: torch.device | str | None = None
    values: str | None = None
    group_size: int = GROUP_SIZE
    #: Of the dense model, by layer: the norms of the inputs, once they are known.
    norms: dict[str, Tensor] = field(default_factory=dict, init=False)
    #: Whether a level has warned of emptied tensors: once is enough for a sweep.
    has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_model(self.model)
        self.how = _method("magnitude" if self.method is None else self.method, self.distribution)
        self.units = parse_pattern(self.pattern)
        self._check_values()
        if isinstance(self.units, Block) and not (self.units.is_unstructured or self.how.removes_blocks):
            raise ValueError(
                f"{self.how.name} prunes single weights or N:M, got blocks of {self.units.rows} x "
                f"{self.units.columns}. Use method='wanda' or 'magnitude' for blocks."
            )
        if self.layers not in (*get_args(Preset), "paper", None):
            raise ValueError(f"layers must be 'blocks', 'all_linear', 'all', 'paper' or None, got {self.layers!r}.")
        preset, exclude = self.layers, self.exclude
        if preset == "paper":
            preset = "blocks"
            if not isinstance(exclude, str):  # which is refused below
                exclude = [*exclude, *outer_blocks(self.model)]
        self.found = find_layers(self.model, preset, include=self.include, exclude=exclude, frozen=True)
        self.left = left_dense(self.model, self.found, exclude=exclude, frozen=True) if preset else {}
        #: The matrices to prune: of a stack one per expert.
        self.targets = [matrix for layer in self.found for matrix in layer.matrices()]
        for layer in self.targets:
            if layer.param.is_meta or Shard.of(layer.param).group is not None:
                raise ValueError(f"{layer.name} is not whole in memory: load or gather the model first.")
            if layer.param.dtype not in FLOATS:
                raise TypeError(
                    f"{layer.name} must be one of {', '.join(map(str, FLOATS))}, got {layer.param.dtype}. Load the "
                    "model without quantization, or name this layer in exclude=[...]."
                )
            self.units.check(layer.name, _matrix(layer).shape, 1)
        warn_of_non_finite({layer.name: layer.param for layer in self.found})
        self._check_distribution()
        self.batches = None if self.data is None else read_batches(self.data, self.samples)
        if self.method is None and self.batches is not None and not _is_owl(self.distribution):
            is_block = isinstance(self.units, Block) and not self.units.is_unstructured
            best = "wanda" if is_block else "sparsegpt"  # which removes no blocks
            raise ValueError(
                f"data is given and method is not: magnitude, the default, reads no data. Give method={best!r}, or "
                "leave data out."
            )
        self.where = None if self.device is None else torch.device(self.device)
        if self.how.statistic is not None and self.batches is None:
            raise ValueError(
                f"method={self.how.name!r} needs calibration data: give data=, an iterable of batches as the model "
                "takes them, or use method='magnitude'."
            )

    def prune(self, sparsity: float | None, *, sequential: bool) -> Report:
        """Block by block: gather, then prune."""
        counts = self.counts(sparsity)
        if self.how.statistic is None:
            return self._report([self._prune(layer, {}, counts[layer.name]) for layer in self.targets])
        pruned: dict[str, PrunedLayer] = {}

        def visit(layer: Layer, statistic: Statistic) -> None:
            pruned[layer.name] = self._prune(layer, self._prepare(layer, statistic), counts[layer.name])

        self._calibrate(self.how.statistic, visit, sequential)
        return self._report([pruned[layer.name] for layer in self.targets])

    def prepare(self) -> dict[str, Prepared]:
        """By layer, what its pruning at any sparsity needs, from one pass of the dense model; kept on the host."""
        everything: dict[str, Prepared] = {layer.name: {} for layer in self.targets}

        def visit(layer: Layer, statistic: Statistic) -> None:
            everything[layer.name] = {key: value.cpu() for key, value in self._prepare(layer, statistic).items()}
            self.norms[layer.name] = _norms(statistic)

        if self.how.statistic is not None:
            self._calibrate(self.how.statistic, visit, sequential=False)
        return everything

    @torch.no_grad()
    def apply(self, sparsity: float | None, prepared: Mapping[str, Prepared]) -> Report:
        """Prune with what :meth:`prepare` returned."""
        counts = self.counts(sparsity)
        return self._report([self._prune(layer, prepared[layer.name], counts[layer.name]) for layer in self.targets])

    @torch.no_grad()
    def counts(self, sparsity: float | None) -> dict[str, int]:
        """How many units each layer loses. (N:M fixes it; the numbers are not read.)"""
        self.check_sparsity(sparsity)
        if isinstance(self.units, NM):
            return {layer.name: 0 for layer in self.targets}
        size = self.units.rows * self.units.columns
        sizes = {layer.name: prod(layer.shape) // size for layer in self.targets}
        distribution = OWL() if self.distribution == "owl" else self.distribution
        if isinstance(distribution, OWL):
            assert sparsity is not None
            distribution = self._owl_ratios(distribution, sparsity)
        shapes = {layer.name: layer.shape for layer in self.targets}
        counts = allocate(distribution, sparsity or 0.0, sizes, shapes)
        if isinstance(counts, int):
            # SparseGPT too counts by magnitude: by Wanda's scores a byte GPT with l1 had 8.54 at 90 % instead of 7.81.
            by_wanda = isinstance(self.how, Wanda)
            self._gather_norms(needed=by_wanda)
            scores = [self._scores(layer) if by_wanda else _matrix(layer) for layer in self.targets]
            chosen = smallest([self.units.unit_scores(each) for each in scores], counts)
            counts = {layer.name: int(mask.sum()) for layer, mask in zip(self.targets, chosen, strict=True)}
        if sparsity is not None and sparsity < _HIGH and not self.has_warned:
            self._warn_of_emptied(self.units, counts, sparsity)
        return counts

    def _warn_of_emptied(self, pattern: Block, counts: Mapping[str, int], sparsity: float) -> None:
        """Warn of tensors that lose nearly all their weights. Weights that are zero already are not lost."""
        emptied: dict[str, tuple[int, int]] = {}
        for layer in self.targets:
            units = pattern.unit_scores(_matrix(layer))
            if counts[layer.name] >= _EMPTIED * units.numel():  # else there is no need to count its zeros
                alive = int(units.count_nonzero())
                lost = counts[layer.name] - (units.numel() - alive)
                if alive and lost >= _EMPTIED * alive:
                    emptied[layer.name] = lost, alive
        if not emptied:
            return
        self.has_warned = True
        name, (lost, alive) = max(emptied.items(), key=lambda entry: entry[1][0] / entry[1][1])
        unit = "weights" if pattern.is_unstructured else "blocks"
        one_threshold = " One threshold suits models trained with l1." if self.distribution == "global" else ""
        warn_user(
            f"distribution={self.distribution!r} at sparsity {sparsity} removes at least {100 * _EMPTIED:g} % of "
            f"{len(emptied)} of {len(self.targets)} tensors; worst is {name}, which loses {lost} of {alive} {unit}. "
            f"Look at report.summary(), and use distribution='uniform', the default.{one_threshold}"
        )

    def _owl_ratios(self, owl: OWL, sparsity: float) -> dict[str, float]:
        self._gather_norms(needed=self.batches is not None)
        scores: dict[str, Callable[[], list[Tensor]]] = {
            block: partial(lambda inside: [self._scores(layer).abs() for layer in inside], inside)
            for blocks in block_sequences(self.model).values()
            for block, inside in layers_by_block(self.targets, blocks).items()
            if inside
        }
        if not scores:
            raise ValueError("distribution='owl' gives each block its sparsity, and no layer lies in a block.")
        return {**owl.ratios(scores, sparsity), "*": sparsity}  # what lies outside the blocks gets the mean

    def _gather_norms(self, needed: bool) -> None:
        def visit(layer: Layer, statistic: Statistic) -> None:
            statistic.check(layer.name)
            self.norms[layer.name] = _norms(statistic)

        if needed and not self.norms:
            self._calibrate(InputNorms, visit, sequential=False)

    def _scores(self, layer: Layer) -> Tensor:
        W = _matrix(layer)
        return wanda_scores(W, self.norms[layer.name].to(W.device)) if self.norms else W

    def _calibrate(
        self, statistic: type[Statistic], visit: Callable[[Layer, Statistic], None], sequential: bool
    ) -> None:
        def visit_each(layers: Sequence[Layer], statistics: Mapping[str, Statistic]) -> None:
            for layer in layers:
                visit(layer, statistics[layer.name])

        assert self.batches is not None
        calibrate(
            self.model, self.batches, self.targets, statistic=statistic, visit=visit_each, sequential=sequential,
            device=self.where,
        )  # fmt: skip

    def _prepare(self, layer: Layer, statistic: Statistic) -> Prepared:
        if not statistic.rows:
            logger.warning("%s: no calibration token was routed to this expert; pruned by magnitude.", layer.name)
            return {}
        return self.how.prepare(_matrix(layer).to(statistic.device), statistic, layer.name)

    @torch.no_grad()
    def _prune(self, layer: Layer, prepared: Prepared, count: int) -> PrunedLayer:
        stored = _matrix(layer)
        device = self.where or stored.device
        W = stored.to(device, copy=True)  # of some convolutions it is a view with other strides, which copy_ refuses
        has_seen_nothing = self.how.statistic is not None and not prepared
        how = Magnitude() if has_seen_nothing else self.how
        error = how.prune(W, {key: value.to(device) for key, value in prepared.items()}, self.units, count)
        layer.inputs_last.copy_(W.view(layer.inputs_last.shape))
        if not (isinstance(how, SparseGPT) and how.grid):
            self._round(layer)
        return PrunedLayer(layer.name, layer.shape, int(layer.inputs_last.count_nonzero()), error)

    def _round(self, layer: Layer) -> None:
        """Round the weights to the nearest values of the precision asked for."""
        is_matrix = layer.inputs_last.dim() == 2
        weight = layer.inputs_last if is_matrix else layer.param.detach()  # files group all inputs of a convolution
        if isinstance(self.precision, Grid):
            weight.copy_(self.precision.round(weight.flatten(1)).view(weight.shape))
        elif self.precision is not None:
            weight.copy_(weight.to(self.precision))

    def present(self) -> Report:
        """The layers as they are now."""
        return self._report([PrunedLayer(x.name, x.shape, int(x.inputs_last.count_nonzero())) for x in self.targets])

    def _report(self, matrices: list[PrunedLayer]) -> Report:
        """One row per parameter: the experts of a stack together."""
        rows, layers = iter(matrices), []
        for layer in self.found:
            own = [next(rows) for _ in range(layer.experts or 1)]
            errors = [row.error for row in own if row.error is not None]
            error = sum(errors) / len(errors) if errors else None
            layers.append(PrunedLayer(layer.name, layer.shape, sum(row.kept for row in own), error))
        return Report(self.how.name, layers, sum(p.numel() for p in self.model.parameters()), self.left)

    def check_sparsity(self, sparsity: float | None) -> None:
        """Refuse a sparsity that is none, or that something else fixes."""
        if isinstance(self.distribution, Mapping):
            if sparsity is not None:
                raise ValueError(
                    f"the mapping in distribution fixes each layer's sparsity, so sparsity={sparsity} has no meaning "
                    "with it. Leave one of them out."
                )
        else:
            check_sparsity(sparsity, self.units)

    def _check_values(self) -> None:
        self.precision = parse_values(self.values, self.group_size)
        if not isinstance(self.precision, Grid):
            return
        if isinstance(self.units, NM) and self.group_size % self.units.m:
            raise ValueError(
                f"group_size must be a multiple of {self.units.m} for {self.units.n}:{self.units.m}, got "
                f"{self.group_size}."
            )
        if isinstance(self.how, SparseGPT):
            self.how = replace(self.how, grid=self.precision)

    def _check_distribution(self) -> None:
        if isinstance(self.units, NM) and self.distribution != "uniform":
            raise ValueError(
                f"{self.units.n}:{self.units.m} fixes the sparsity of every layer: there is nothing for "
                f"distribution={self.distribution!r} to divide. Leave one of them out."
            )
        if isinstance(self.distribution, Mapping):
            check_ratios(self.distribution, [layer.name for layer in self.targets])
        elif not isinstance(self.distribution, OWL) and self.distribution not in ("uniform", "global", "erk", "owl"):
            raise ValueError(
                "distribution must be 'uniform', 'global', 'erk', 'owl', an OWL(...) or a mapping of sparsities by "
                f"layer, got {self.distribution!r}."
            )


def _method(method: str | Method, distribution: object) -> Method:
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, or an instance of Method, got {method!r}.")
    # One threshold for all layers knows no rows.
    return Wanda(compare="tensor") if method == "wanda" and distribution == "global" else METHODS[method]()


def _is_owl(distribution: object) -> bool:
    return distribution == "owl" or isinstance(distribution, OWL)


def _norms(statistic: Statistic) -> Tensor:
    """The norms of the inputs, on the host; for an expert that saw none, as if all were 1."""
    return statistic.norms().cpu() if statistic.rows else torch.ones(statistic.inputs)


def _matrix(layer: Layer) -> Tensor:
    """The weights, out x in; a view where they are stored as a matrix, in either order."""
    return layer.inputs_last.reshape(len(layer.inputs_last), -1)
