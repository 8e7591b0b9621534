"""Which weights are masked: presets, name patterns, and the summary table.

The presets, by what the paper and its base code do:

- ``"blocks"`` (default): the linear layers inside the transformer blocks. Embeddings, patch embedding and head stay
  dense. A block is an item of a ``ModuleList`` or ``Sequential`` whose items are all of one class and have submodules:
  ``blocks.0`` in timm, ``transformer.h.0`` in Hugging Face GPT-2, ``encoder.layer.0`` in BERT.
- ``"all_linear"``: every linear layer, head included (the paper's base code); the patch embedding stays dense.
- ``"all"``: convolutions too.
- ``None``: only what ``include`` names.

Linear layers are ``nn.Linear``, the ``Conv1D`` of Hugging Face's GPT-2, the packed projections of
``nn.MultiheadAttention`` and the experts of mixture models, which transformers stacks in one parameter of three
dimensions: such a stack counts as one matrix per expert. A weight used twice (tied) appears once, under its first
name. Biases, norms and embeddings are never in a preset; frozen weights (``requires_grad=False``) are left out unless
asked for. Matrices inside the blocks that a preset does not reach are named in a warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from os import PathLike
from typing import Literal

from torch import Tensor, nn

from horst.parameters.kinds import block_prefixes, clean_name, parameter_kinds

logger = logging.getLogger(__name__)

Preset = Literal["blocks", "all_linear", "all"]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class Layer:
    """One maskable weight, or one matrix of a stack.

    Args:
        name: Name without wrappers; of expert i in the stack ``experts.down_proj`` it is ``experts.down_proj.i``.
        param: The parameter: the weight itself, or the stack that it lies in.
        input_dim: The dimension of the weight that multiplies the input.
        experts: Number of matrices stacked along dimension 0; 0 for a weight that is no stack.
        expert: Index of the matrix in its stack; None for a whole parameter.
    """

    name: str
    param: nn.Parameter
    input_dim: int
    experts: int = 0
    expert: int | None = None

    def matrices(self) -> list[Layer]:
        """The matrices of a stack, one per expert; of any other weight itself alone."""
        one = replace(self, input_dim=self.input_dim - 1, experts=0)
        return [replace(one, name=f"{self.name}.{i}", expert=i) for i in range(self.experts)] or [self]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.param.shape if self.expert is None else self.param.shape[1:])

    @property
    def inputs_last(self) -> Tensor:
        """The weight with its inputs as the last dimension: a view of the parameter."""
        weight = self.param.detach() if self.expert is None else self.param.detach()[self.expert]
        return weight.movedim(self.input_dim, -1)


def find_layers(
    model: nn.Module,
    preset: Preset | None = "blocks",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    frozen: bool = False,
) -> list[Layer]:
    """The weights of ``model`` to mask, in the order of the model.

    Args:
        preset: Name of a preset, see the module; None chooses nothing but ``include``.
        include: Wildcard patterns of parameter names to add (``"head.weight"``, ``"*.embed_tokens.weight"``).
        exclude: Wildcard patterns to leave out; they win over ``include``.
        frozen: Whether to include weights with ``requires_grad=False``: they are not trained, but can be pruned.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [layer.name for layer in find_layers(model, "all_linear", exclude=["2.*"])]
        ['0.weight']
    """
    check_model(model)
    if isinstance(include, str) or isinstance(exclude, str):
        raise TypeError("include and exclude are lists of patterns: write ['head.*'], not 'head.*'.")
    if preset not in ("blocks", "all_linear", "all", None):
        raise ValueError(f"layers must be 'blocks', 'all_linear', 'all' or None, got {preset!r}.")
    candidates = _candidates(model)
    known = {id(weight): (dim, experts) for weight, dim, experts in _weights(model, "all")}
    chosen = {id(weight) for weight, _, _ in _weights(model, preset)} if preset else set()
    for pattern in include:
        chosen |= {id(candidates[name]) for name in _matching(pattern, candidates, "include")}
    for pattern in exclude:
        chosen -= {id(candidates[name]) for name in _matching(pattern, candidates, "exclude")}
    allowed = {name: p for name, p in candidates.items() if p.requires_grad or frozen}
    layers = [Layer(name, p, *known.get(id(p), (1, 0))) for name, p in allowed.items() if id(p) in chosen]
    if not layers:
        hint = ""
        if any(id(p) in chosen for p in candidates.values()):
            hint = "What they choose is frozen (requires_grad=False). "
        elif preset == "blocks" and not any(True for _ in _weights(model, preset)):
            found = "The blocks hold no linear layers" if block_prefixes(model) else "No transformer blocks were found"
            hint = f"{found}: use layers='all_linear' or 'all'. "
        raise ValueError(
            f"nothing to mask: layers={preset!r}, include={list(include)}, exclude={list(exclude)} choose no "
            f"{'' if frozen else 'trainable '}weight. {hint}Parameters of two or more dimensions: "
            f"{_shorten(candidates)}."
        )
    if preset and (left := left_dense(model, layers, exclude=exclude, frozen=frozen)):
        logger.warning(
            "%d weights of two or more dimensions inside the blocks (%d parameters) are left dense: %s. "
            "include=[...] adds them, exclude=[...] silences this.",
            *(len(left), sum(left.values()), _shorten(left)),
        )
    return layers


def left_dense(
    model: nn.Module, layers: Sequence[Layer], *, exclude: Sequence[str] = (), frozen: bool = False
) -> dict[str, int]:
    """The matrices inside the blocks that are not in ``layers``, with their numbers of weights.

    Those that ``exclude`` names are left out, and without ``frozen`` those that are not trained.
    """
    blocks, kinds = block_prefixes(model), parameter_kinds(model)
    chosen = {id(layer.param) for layer in layers}
    return {
        clean_name(name): p.numel()
        for name, p in model.named_parameters()
        if kinds[name] == "matrix" and any(name.startswith(prefix) for prefix in blocks)
        if p.numel() > max(p.shape)  # else it is a vector with more dimensions of size 1
        if id(p) not in chosen and (p.requires_grad or frozen)
        if not any(fnmatchcase(clean_name(name), pattern) for pattern in exclude)
    }


def check_model(model: object) -> None:
    """Refuse what is not a module: a folder, a file, a state dict."""
    if not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, (str, PathLike)) else type(model).__name__
        raise TypeError(
            f"model must be a torch.nn.Module, got {given}. Load a saved model first: "
            "horst.export.load_pretrained(path) reads a Hugging Face directory."
        )


def _candidates(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name without wrappers, every parameter that may be masked: a matrix or more, not empty, tied weights once."""
    candidates: dict[str, nn.Parameter] = {}
    for name, p in model.named_parameters():
        if p.dim() < 2 or p.numel() == 0:
            continue
        if clean_name(name) in candidates:
            raise ValueError(
                f"two parameters are called {clean_name(name)!r} once wrappers are left out of their names (one of "
                f"them is {name!r}): rename a submodule, so that masks can be told apart."
            )
        candidates[clean_name(name)] = p
    return candidates


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its input by its ``weight``: ``nn.Linear`` or Hugging Face's ``Conv1D``.

    Example:
        >>> is_linear(nn.Linear(2, 2)), is_linear(nn.LayerNorm(2))
        (True, False)
    """
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's ``Conv1D``, a linear layer that stores its weight as (input, output)."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def expert_stacks(module: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """The two stacks of a mixture's experts (input first), each with the dimension that multiplies the input.

    They are what transformers calls ``gate_up_proj`` (or ``up_proj``) and ``down_proj``: experts x out x in, or
    experts x in x out where the module says ``is_transposed`` or the two shapes fit together only so. Any other module
    has none.
    """
    stacks = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
    up, down = stacks.get("gate_up_proj", stacks.get("up_proj")), stacks.get("down_proj")
    if up is None or down is None or len(stacks) != 2:
        return []
    fits_transposed = up.shape[1] == down.shape[2] and up.shape[2] != down.shape[1]
    dim = 1 if getattr(module, "is_transposed", fits_transposed) else 2
    return [(up, dim), (down, dim)]


def _weights(model: nn.Module, preset: Preset) -> Iterator[tuple[Tensor, int, int]]:
    """Of each weight in the preset: the dimension that multiplies the input, and the number of stacked matrices."""
    blocks = block_prefixes(model)
    for name, module in model.named_modules():
        if preset == "blocks" and not any(name.startswith(prefix) for prefix in blocks):
            continue
        if isinstance(module, nn.Linear) or (isinstance(module, _CONVOLUTIONS) and preset == "all"):
            yield module.weight, 1, 0
        elif is_linear(module):
            yield module.weight, 0, 0  # Conv1D
        elif isinstance(module, nn.MultiheadAttention):
            for weight in (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
                if weight is not None:
                    yield weight, 1, 0
        else:
            for stack, input_dim in expert_stacks(module):
                yield stack, input_dim, len(stack)


def _matching(pattern: str, candidates: dict[str, nn.Parameter], argument: str) -> list[str]:
    names = [name for name in candidates if fnmatchcase(name, pattern)]
    if not names:
        raise ValueError(
            f"{argument}={pattern!r} matches no parameter of two or more dimensions. Names look like: "
            f"{_shorten(candidates)}. A pattern must fit the whole name: use '*' at its ends."
        )
    return names


def _shorten(names: Mapping[str, object]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f", ... ({len(listed)} in all)" if len(listed) > 8 else "")


def summary_table(
    rows: Sequence[tuple[str, Sequence[int], int]], model_parameters: int, errors: Mapping[str, float] | None = None
) -> str:
    """A table of ``(name, shape, zeros)``: per layer, over these layers, and of the whole model.

    Args:
        rows: Tuples, one per layer.
        model_parameters: Number of parameters of the whole model.
        errors: Errors of the layers' outputs, by layer, for one more column.

    Example:
        >>> print(summary_table([("fc.weight", (10, 10), 90)], model_parameters=110))
        layer         shape    weights      zeros   share
        fc.weight     10x10        100         90   90.0%
        these layers               100         90   90.0%
        whole model                110         90   81.8%
    """
    sizes = [("x".join(map(str, shape)), name, math.prod(shape), zeros) for name, shape, zeros in rows]
    width = max(len("these layers"), *(len(name) for _, name, _, _ in sizes))
    across = max(7, *(len(shape) + 2 for shape, _, _, _ in sizes))
    weights, zeros = sum(n for _, _, n, _ in sizes), sum(k for _, _, _, k in sizes)
    body = [*sizes, ("", "these layers", weights, zeros), ("", "whole model", model_parameters, zeros)]
    lines = [f"{'layer':{width}}{'shape':>{across}}{'weights':>11}{'zeros':>11}{'share':>8}"]
    lines += [  # 100.0% says that no weight is left: 99.96 % are shown as 99.9%
        f"{name:{width}}{shape:>{across}}{n:>11}{k:>11}{min(k / n, 0.999 if k < n else 1.0):>8.1%}"
        for shape, name, n, k in body
    ]
    if errors:
        column = ["error", *(f"{errors[name]:.4g}" if name in errors else "" for _, name, _, _ in body)]
        lines = [f"{line}{entry:>12}".rstrip() for line, entry in zip(lines, column, strict=True)]
    return "\n".join(lines)
