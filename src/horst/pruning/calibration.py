"""The layer-by-layer flow of calibration data, written once for all methods and models.

One block after the other goes to the device, sees the hidden states of all batches, is pruned, and sees them again to
make the next block's (:mod:`horst.pruning.chains`). Hidden states wait on the host. What lies outside the blocks comes
last, in a run of the model with the finished blocks replaced by what they returned.

Blocks that turn out not to be called one after the other are treated as outside: their layers are calibrated in runs of
the whole model where it lives.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horst.parameters.kinds import clean_name
from horst.parameters.modes import Batch, evaluating, without_cache
from horst.pruning.chains import Chain, NotAChain, block_sequences, explained, layers_by_block, replayed, run_model
from horst.pruning.experts import expert_inputs, is_mixture
from horst.pruning.method import Statistic
from horst.sparsity.layers import Layer, expert_stacks, is_linear

logger = logging.getLogger(__name__)

# Called for the layers of one block, with the statistics of their inputs by name; may change the weights.
Visit = Callable[[Sequence[Layer], Mapping[str, Statistic]], None]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Sequence[Layer],
    *,
    statistic: type[Statistic],
    visit: Visit,
    sequential: bool,
    device: torch.device | None = None,
) -> None:
    """Gather statistics of the inputs of ``layers`` block by block, and let ``visit`` act on each block.

    Args:
        model: The model. It stays where it is; one block at a time is on ``device``.
        batches: Batches as the model takes them, each a tensor, a tuple or list of arguments, or a mapping of keyword
            arguments. Of a mapping with an ``attention_mask`` (batch x length), padded positions are left out of the
            statistics.
        layers: The weights to gather for; each must belong to a linear layer that is called, or be one matrix of a
            stack of experts (:meth:`horst.sparsity.layers.Layer.matrices`). The statistic of an expert that no token
            was routed to has 0 rows.
        statistic: Class of the sums.
        visit: Function that is called with the layers of one block after the other.
        sequential: Whether a block's inputs come from the blocks before it as ``visit`` left them (one more pass
            through each block), or as they were.
        device: Device to compute on; None is where each block is.

    Example:
        >>> from horst.pruning import InputNorms
        >>> from horst.sparsity import find_layers
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])
        >>> def visit(layers, statistics):
        ...     print([layer.name for layer in layers], statistics[layers[0].name].rows)
        >>> calibrate(model, [torch.ones(5, 2)], find_layers(model), statistic=InputNorms, visit=visit, sequential=True)
        ['0.0.weight'] 5
        ['1.0.weight'] 5
    """
    modules = _owners(model, layers)
    rest, done = list(layers), list[Chain]()

    def gather(layers: Sequence[Layer], runs: Callable[[int], object]) -> None:
        """Do the run of each batch with hooks on the layers, then visit them."""
        found: dict[str, Statistic] = {}

        def add(name: str, X: Tensor) -> None:
            if name not in found:
                found[name] = statistic(X.shape[1], X.device)
            found[name].add(X)

        for i, batch in enumerate(batches):
            with _observed(layers, modules, batch, device, add):
                runs(i)
        unseen = [x for x in layers if x.name not in found or (x.expert is None and not found[x.name].rows)]
        if empty := [layer.name for layer in unseen]:
            raise ValueError(
                f"no calibration input reached {', '.join(empty)}: the model computes without calling the layer, or "
                "the data never leads there. Give more data, name the layers in exclude=[...], or use "
                "method='magnitude'."
            )
        visit(layers, found)

    def run_the_rest(i: int) -> None:
        with replayed(done, i), explained(batches[i]) if i == 0 else contextlib.nullcontext():
            run_model(model, batches[i])

    with _evaluation(model):
        inside_of = {name: layers_by_block(layers, blocks) for name, blocks in block_sequences(model).items()}
        sequences = {name: blocks for name, blocks in block_sequences(model).items() if any(inside_of[name].values())}
        for name, blocks in sequences.items():
            chain, inside = Chain(blocks, device), list(inside_of[name].values())
            try:
                _refuse_shared(blocks, modules)
                chain.catch(model, batches, done)
            except NotAChain as error:
                logger.warning("%s* is not a chain of blocks (%s): runs of the whole model instead.", name, error)
                continue
            in_chain = {layer for own in inside for layer in own}
            rest = [layer for layer in rest if layer not in in_chain]
            is_needed_after = bool(rest) or name != list(sequences)[-1]
            _walk(chain, inside, gather, len(batches), sequential, is_needed_after)
            done.append(chain)
        if rest:
            gather(rest, run_the_rest)


def _refuse_shared(blocks: Mapping[str, nn.Module], modules: Mapping[str, Sequence[nn.Module]]) -> None:
    """Refuse blocks of which one has a weight that is tied to another: it multiplies inputs there, too."""
    for block in blocks.values():
        own = set(block.modules())
        for name, owners in modules.items():
            if 0 < len(own.intersection(owners)) < len(owners):
                raise NotAChain(f"{name} is also used outside of its block")


def _walk(
    chain: Chain,
    inside: Sequence[Sequence[Layer]],
    gather: Callable[[Sequence[Layer], Callable[[int], object]], None],
    batches: int,
    sequential: bool,
    is_needed_after: bool,
) -> None:
    """From block to block: gather, visit, and make the hidden states of the next."""
    end = len(inside) if is_needed_after else 1 + max(k for k, layers in enumerate(inside) if layers)
    for k, name in enumerate(list(chain.blocks)[:end]):
        is_output_needed = is_needed_after or k + 1 < end
        is_one_pass = is_output_needed and not (sequential and inside[k])
        with chain.on_device(name):
            if inside[k]:
                gather(inside[k], partial(chain.advance if is_one_pass else chain.forward, k))
            if is_output_needed and not (is_one_pass and inside[k]):
                for i in range(batches):
                    chain.advance(k, i)
        logger.info("%s: %d layers done", name, len(inside[k]))


@contextlib.contextmanager
def _observed(
    layers: Sequence[Layer],
    modules: Mapping[str, Sequence[nn.Module]],
    batch: Batch,
    device: torch.device | None,
    add: Callable[[str, Tensor], None],
) -> Iterator[None]:
    """Give ``add`` the name and the inputs (rows x inputs) of each of these layers when it is called."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    counts = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None  # True at positions that count
    places = [] if counts is None else [[n for n in counts.shape if n > 1], [counts.numel()]]

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).detach()
        x = x if device is None else x.to(device)
        X = x.reshape(-1, x.shape[-1])
        # Some models pass rows x inputs (OPT), or batch x 1 x length x inputs (DeepSeek V3).
        if counts is not None and [n for n in x.shape[:-1] if n > 1] in places:
            X = X[counts.reshape(-1).to(X.device)]
        add(name, X)

    names = {(id(layer.param), layer.expert): layer.name for layer in layers}

    def experts_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stacks = [id(stack) for stack, _ in expert_stacks(module)]
        for i, *inputs in expert_inputs(module, args, kwargs, counts):
            for stack, X in zip(stacks, inputs, strict=True):
                if (stack, i) in names:
                    add(names[stack, i], X if device is None else X.to(device))

    mixtures = {module for layer in layers if layer.expert is not None for module in modules[layer.name]}
    handles = [module.register_forward_pre_hook(experts_hook, with_kwargs=True) for module in mixtures]
    handles += [
        module.register_forward_pre_hook(partial(hook, layer.name), with_kwargs=True)
        for layer in layers
        if layer.expert is None
        for module in modules[layer.name]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _owners(model: nn.Module, layers: Sequence[Layer]) -> dict[str, list[nn.Module]]:
    """By a layer's name, the modules whose inputs its weight multiplies: several where it is tied."""
    _refuse_attention(model, layers)
    modules: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        stacks = [stack for stack, _ in expert_stacks(module)] if is_mixture(module) else []
        for weight in [module.weight] if is_linear(module) else stacks:
            modules.setdefault(id(weight), []).append(module)
    without = [layer.name for layer in layers if id(layer.param) not in modules]
    if without:
        raise ValueError(
            f"the inputs of {', '.join(without)} cannot be observed: a method that needs data prunes the weights of "
            "linear layers (nn.Linear, Conv1D) and of experts as transformers stacks them. Name these in "
            "exclude=[...], or use method='magnitude'."
        )
    return {layer.name: modules[id(layer.param)] for layer in layers}


def _refuse_attention(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Refuse weights of torch's attention with a pattern that leaves out all of them, and nothing else."""
    inside: dict[str, list[str]] = {}  # by the attention's name, the names of its layers
    for name, module in model.named_modules():
        # One with a forward of its own may well call its layers.
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            own = {id(p) for p in module.parameters()}
            if found := [layer.name for layer in layers if id(layer.param) in own]:
                inside[clean_name(name)] = found
    if not inside:
        return
    refused = [layer for own in inside.values() for layer in own]
    others = [layer.name for layer in layers if layer.name not in refused]
    patterns = sorted({f"*{name.rpartition('.')[2]}*" for name in inside})
    if any(fnmatchcase(other, pattern) for other in others for pattern in patterns):
        patterns = [f"{name}.*" for name in inside]
    exclude = f"Use exclude={patterns}, or method='magnitude'." if others else "Use method='magnitude'."
    raise ValueError(
        f"the inputs of {', '.join(refused)} cannot be observed: nn.MultiheadAttention computes without calling its "
        f"layers. {exclude}"
    )


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, uncompiled, and without key-value caches."""
    with evaluating(model), without_cache(model), contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing can be compiled, and its import is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
