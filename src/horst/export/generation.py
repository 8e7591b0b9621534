"""Greedy generation of text, one decoding step per token, captured in a CUDA graph on a GPU.

With sparse layers a step takes less time than Python needs to launch its kernels. A captured step is launched at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horst.export.decode_attention import configs_to_switch, switched
from horst.extras import load_extra
from horst.parameters.modes import evaluating

# The host waits for the device only as often as this, to see whether all texts have ended.
_TOKENS_PER_CHECK = 32
_WARM_UP_STEPS = 3
# Rounding may make the logits differ by this share of their spread: in 32 bits, and in 16 bits or under autocast.
_ROUNDING = (0.01, 0.2)


def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    compile: bool = False,
    graph: bool | None = None,
) -> Tensor:
    """Prompt and new tokens, each the most likely one: what ``model.generate(prompt, do_sample=False)`` returns.

    Each call captures the step anew. With ``compile`` it is compiled once for each model, number of texts and total
    length. For several prompts keep a :class:`Decoder`.

    Args:
        model: Causal language model of transformers, dense or after :func:`horst.export.sparsify`.
        prompt: Token ids, texts x tokens. The texts have the same length, without padding.
        max_new_tokens: Largest number of tokens to add.
        eos_token_id: Token or tokens that end a text; ``()`` for none. None takes those of ``model.generation_config``.
        pad_token_id: Token that fills a text after its end, while others go on. None takes that of
            ``model.generation_config``, or else the first that ends a text.
        compile: Whether the step is compiled with ``torch.compile`` first.
        graph: Whether the step is captured in a CUDA graph. None captures it on a CUDA device.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        >>> generate(GPT2LMHeadModel(config), torch.tensor([[5, 6, 7]]), max_new_tokens=4, eos_token_id=()).shape
        torch.Size([1, 7])
    """
    _check_prompt(prompt)
    length = prompt.shape[1] + _checked_count("max_new_tokens", max_new_tokens)
    decoder = Decoder(model, length=length, batch_size=prompt.shape[0], compile=compile, graph=graph)
    return decoder.generate(prompt, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, pad_token_id=pad_token_id)


class Decoder:
    """A decoding step that is captured once and used for many prompts.

    Keys and values lie in a cache of fixed size, so that every step is the same work on the same memory. Decoding is
    greedy: ``model.generation_config`` is read for the tokens that end a text, not for sampling or penalties. Models
    with sliding windows or with layers other than attention are refused. So are those that give other logits with this
    cache than without one, which a text of three tokens shows. Do not move or convert the model while a decoder of it
    is in use. Weights may change in place. Once any is replaced, as by ``load_state_dict`` into sparse layers, a
    captured decoder raises: make another.

    For lower precision convert the model to bfloat16. Under autocast, models with rotary positions fail: their keys
    are float32, their values are not, and the cache takes one dtype.

    Args:
        model: Causal language model of transformers, dense or after :func:`horst.export.sparsify`.
        length: Largest number of tokens of a text, prompt and new tokens together.
        batch_size: Number of texts at once.
        compile: Whether the step is compiled with ``torch.compile`` first.
        graph: Whether the step is captured in a CUDA graph. None captures it on a CUDA device.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        >>> decoder = Decoder(GPT2LMHeadModel(config), length=16)
        >>> for prompt in (torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])):
        ...     decoder.generate(prompt, max_new_tokens=4, eos_token_id=()).shape
        torch.Size([1, 7])
        torch.Size([1, 6])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        length: int,
        batch_size: int = 1,
        compile: bool = False,
        graph: bool | None = None,
    ) -> None:
        self.device = _check_model(model)
        self.model: Any = model
        self.length, self.batch_size = _checked_count("length", length), _checked_count("batch_size", batch_size)
        _check_length(model, length)
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph=True needs a model on a CUDA device, got one on {self.device}. Leave graph out.")
        parameters = inspect.signature(model.forward).parameters
        # some versions of transformers want to be told where the cache is written, others count
        self._names_places = "cache_position" in parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._configs = configs_to_switch(model)
        self._forward = _compiled(model, length, batch_size) if compile else _logits
        self._used = 0  # tokens known so far; 0 before the first prompt
        self._graph: torch.cuda.CUDAGraph | None = None
        with self._ready():
            self._cache = _static_cache(model, length)
            self._places = torch.arange(length, device=self.device)
            self._tokens = torch.zeros(batch_size, length, dtype=torch.long, device=self.device)
            self._last = torch.zeros(1, dtype=torch.long, device=self.device)  # place of the newest token
            self._check_logits()
            if self.device.type == "cuda" if graph is None else graph:
                self._capture()

    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """Prompt and new tokens; see :func:`horst.export.generate`."""
        _check_prompt(prompt)
        count, start = _checked_count("max_new_tokens", max_new_tokens), prompt.shape[1]
        if start + count > self.length:
            raise ValueError(
                f"A prompt of {start} tokens and max_new_tokens={count} need a length of {start + count}, the decoder's"
                f" is {self.length}. Make a Decoder with length={start + count}, or ask for fewer tokens."
            )
        ends, pad = _ends(self.model, eos_token_id, pad_token_id)
        self.start(prompt)
        if not ends:
            self._go_on(count - 1)
            return self._tokens[:, : start + count].clone()
        end_tokens = torch.tensor(ends, device=self.device)
        while True:
            new = self._tokens[:, start : self._used]
            is_end = torch.isin(new, end_tokens)
            left = start + count - self._used
            if not left or bool(is_end.any(dim=1).all()):
                break
            self._go_on(min(left, _TOKENS_PER_CHECK))
        ended = is_end.cumsum(dim=1) - is_end.long() > 0  # after the first end of each text
        shown = int((~ended).any(dim=0).sum())
        return torch.cat([self._tokens[:, :start], new.masked_fill(ended, pad)[:, :shown]], dim=1)

    def start(self, prompt: Tensor) -> None:
        """Read a prompt, and find the first new token."""
        _check_prompt(prompt)
        texts, count = prompt.shape
        if texts != self.batch_size:
            raise ValueError(
                f"The decoder was made for batch_size={self.batch_size}, got {texts} texts. Make one for {texts}."
            )
        if count >= self.length:
            raise ValueError(f"A prompt of {count} tokens leaves no room in length={self.length}. Make it longer.")
        self._check_weights()
        with self._ready():
            self._cache.reset()
            self._tokens[:, :count].copy_(prompt)
            logits = self._call(_logits, self._places[:count])
            self._tokens[:, count : count + 1].copy_(logits.argmax(dim=-1))
            self._last.fill_(count)
        self._used = count + 1

    def advance(self, tokens: int) -> Tensor:
        """Add ``tokens`` tokens to each text, whether it has ended or not, without waiting for the device.

        Returns:
            The newest tokens, texts x 1.
        """
        if not self._used:
            raise RuntimeError("advance() goes on after a prompt, and there is none. Call start(prompt) first.")
        if not 0 <= tokens <= (left := self.length - self._used):
            raise ValueError(
                f"tokens must lie in [0, {left}], what is left of length={self.length}, got {tokens}. Make a"
                " Decoder with a larger length."
            )
        self._check_weights()
        self._go_on(tokens)
        return self._tokens[:, self._used - 1 : self._used].clone()

    def _go_on(self, tokens: int) -> None:
        with self._ready():
            for _ in range(tokens):
                if self._graph is None:
                    self._step()
                else:
                    self._graph.replay()
        self._used += tokens

    def _step(self) -> None:
        logits = self._call(self._forward, self._last)
        # not compiled with the rest: the compiler looks for the largest of all logits with one block of threads
        self._last.add_(1)
        self._tokens.index_copy_(1, self._last, logits.argmax(dim=-1))

    def _call(self, forward: Any, new: Tensor) -> Tensor:
        options = {"cache_position": new} if self._names_places else {}
        return forward(self.model, self._cache, self._tokens, self._places, new, **options, **self._options)

    def _check_weights(self) -> None:
        if self._graph is not None and _places_in_memory(self.model) != self._captured:
            raise RuntimeError(
                "The model's weights are no longer those that the decoder's graph reads: load_state_dict into sparse "
                "layers or with assign=True replaces them, and so does a conversion. Make another Decoder."
            )

    def _check_logits(self) -> None:
        """Raise where the cache's unused places change the logits, as they do in GPT-Neo's local attention."""
        places = self._places[:3]
        parts = places.split(2)  # a prompt, and a step
        ids = places[None] % 2
        self._tokens[:, : len(places)].copy_(ids)
        try:
            found = torch.cat([self._call(_logits, part)[:1] for part in parts], dim=1)
        except torch.OutOfMemoryError:
            raise
        except Exception as raised:  # as Falcon's with ALiBi, whose positions come from the mask
            raise ValueError(
                f"{type(self.model).__name__} does not run with a mask over a cache of fixed size "
                f"({type(raised).__name__}: {raised}). Use model.generate()."
            ) from raised
        options = {"position_ids": places[None], "attention_mask": torch.ones_like(ids), "use_cache": False}
        expected = self.model(ids, **options).logits[:, -len(parts) :]
        found, expected = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (found, expected))
        error, spread = (found - expected).norm(), (expected - expected.mean(dim=-1, keepdim=True)).norm()
        low_precision = self.model.dtype.itemsize < 4 or torch.is_autocast_enabled(self.device.type)
        if error > _ROUNDING[low_precision] * spread:
            raise ValueError(
                f"{type(self.model).__name__} gives other logits with a cache of {self.length} tokens, most of them not"
                f" in use, than without (difference {float(error / spread):.1e}). Use model.generate()."
            )

    def _capture(self) -> None:
        """Capture the step, after a prompt of one token, which also makes the cache's memory."""

        def begin() -> None:
            self._cache.reset()
            self._last.zero_()
            self._call(_logits, self._places[:1])

        side = _side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                begin()
                self._step()
            begin()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self._step()
        self._captured = _places_in_memory(self.model)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        kind = self.device.type
        # autocast keeps its copies of weights until its block ends, a graph would use them after
        autocast = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)
        # tensors of inference mode could not be changed outside it
        with device, autocast, torch.inference_mode(False), torch.no_grad():  # noqa: SIM117 (too long for one line)
            with evaluating(self.model), switched(self._configs):
                yield


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all decoders: cuBLAS keeps 32 MiB per stream that it has seen."""
    return torch.cuda.Stream(device)


def _places_in_memory(model: nn.Module) -> list[tuple[int, torch.Size]]:
    return [(tensor.data_ptr(), tensor.shape) for tensor in (*model.parameters(), *model.buffers())]


def _logits(model: Any, cache: Any, tokens: Tensor, places: Tensor, new: Tensor, **options: Any) -> Tensor:
    """Logits of what follows the tokens at the places ``new``, whose keys and values enter the cache."""
    mask = (places[None, :] <= new[:, None])[None, None]
    if model.config._attn_implementation == "eager":  # which adds it to the scores
        mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    mask = mask.expand(len(tokens), -1, -1, -1)  # XGLM takes no mask for all texts
    ids = tokens.index_select(1, new)
    options |= {"position_ids": new[None], "attention_mask": mask, "past_key_values": cache, "use_cache": True}
    return model(ids, **options).logits[:, -1:]


_STEPS: MutableMapping[nn.Module, dict[tuple[int, int], Any]] = weakref.WeakKeyDictionary()


def _compiled(model: nn.Module, length: int, batch_size: int) -> Any:
    """``_logits`` compiled, with a code object for each use: the compiler stops at the ninth form of the same code."""
    own = types.FunctionType(_logits.__code__.replace(), globals(), "_logits")
    own = _STEPS.setdefault(model, {}).setdefault((length, batch_size), own)
    # specialized shapes: a second decoder of another length would otherwise get slower kernels for any length
    return torch.compile(own, dynamic=False)


def _static_cache(model: Any, length: int) -> Any:
    transformers = load_extra("transformers")
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    plain = load_extra("transformers.cache_utils").StaticLayer
    if others := sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not plain}):
        raise ValueError(
            f"{type(model).__name__} has layers with a cache of their own ({', '.join(others)}): sliding windows, or "
            "no attention. Only full attention is supported. Use model.generate()."
        )
    return cache


def _check_model(model: Any) -> torch.device:
    """The device of a model that can be decoded."""
    if (
        not isinstance(model, load_extra("transformers").PreTrainedModel)
        or not model.can_generate()
        or model.config.is_encoder_decoder
    ):
        raise TypeError(
            f"model must be a causal language model of transformers, got {type(model).__name__}. Load it with "
            "horst.export.load_pretrained or AutoModelForCausalLM."
        )
    parameters = inspect.signature(model.forward).parameters
    if missing := [name for name in ("position_ids", "past_key_values") if name not in parameters]:
        raise TypeError(f"{type(model).__name__} takes no {' and no '.join(missing)}. Use model.generate().")
    if (attention := model.config._attn_implementation) not in ("sdpa", "eager"):
        raise ValueError(
            f"The model's attention must be sdpa or eager, got {attention}. Call model.set_attn_implementation('sdpa')."
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"The model must be on one device, got {sorted(map(str, devices))}. Call model.to('cuda').")
    return devices.pop()


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, Tensor):
        raise TypeError(
            f"prompt must be a tensor of token ids, got {type(prompt).__name__}. Of a tokenizer's output give "
            "['input_ids'], with return_tensors='pt'."
        )
    if prompt.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"prompt must hold token ids in int64 or int32, got {prompt.dtype}. Call prompt.long().")
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(
            f"prompt must be texts x tokens with at least one of each, got shape {tuple(prompt.shape)}. For one text "
            "write prompt[None]."
        )


def _checked_count(name: str, count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}. 1 is the least.")
    return count


def _check_length(model: Any, length: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"Prompt and new tokens must fit into the model's {limit} positions (max_position_embeddings), got {length}"
            " tokens. Shorten the prompt, or lower max_new_tokens."
        )


def _ends(model: Any, eos: int | Sequence[int] | None, pad: int | None) -> tuple[tuple[int, ...], int]:
    """Tokens that end a text, and the one that follows an end."""
    config = model.generation_config
    found = config.eos_token_id if eos is None else eos
    ends = () if found is None else (found,) if isinstance(found, int) else tuple(found)
    pad = config.pad_token_id if pad is None else pad
    return ends, pad if pad is not None else ends[0] if ends else 0
