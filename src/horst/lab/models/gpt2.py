"""GPT-2 as the paper's language runs train it: pre-LN, packed QKV, learned positions, a head tied to the embedding.

Parameters have the names of Hugging Face's GPT-2, to which :meth:`GPT2.to_hugging_face` converts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from horst.extras import load_extra
from horst.fields import option
from horst.lab.models.half_precision import GELU, AutocastPrecision, Residual
from horst.lab.models.linear_cross_entropy import linear_cross_entropy

LAYER_NORM_EPS = 1e-5
_END_OF_TEXT = 50256
_GELU: dict[str, Callable[[], nn.Module]] = {"exact": GELU, "tanh": functools.partial(nn.GELU, approximate="tanh")}
_ATTENTION_WITH_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The defaults are the paper's model: 123,980,544 parameters.

    Args:
        layers: Number of blocks.
        heads: Attention heads per block.
        width: Width of the residual stream; the MLP is four times as wide.
        context: Longest sequence.
        vocabulary: Number of tokens, at least as many as the tokenizer's. 50304 is GPT-2's 50257 rounded up to a
            multiple of 128.
        bias: Whether linear layers and norms have biases. The paper's base code has none, Hugging Face's GPT-2 has.
        gelu: ``"exact"`` as the paper's base code, ``"tanh"`` as OpenAI's GPT-2 (``gelu_new``).
        tied: One weight for the token embedding and the head; ``--no-tied`` gives each its own.
        dropout: Dropout rate on embeddings, attention weights and the output of each residual branch.
        attention: Attention kernel. ``"cudnn"`` prefers cuDNN's where it runs; otherwise torch chooses. The maths is
            the same.
        residual: Precision of the residual stream under autocast: ``"float32"`` is what adding float32 embeddings
            gives; ``"autocast"`` is autocast's own, half the memory to move.
        loss_rows: Number of tokens whose logits exist at a time in :meth:`GPT2.loss`; None is all. The maths is the
            same.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 512
    vocabulary: int = 50304
    bias: bool = False
    gelu: Literal["exact", "tanh"] = "exact"
    tied: bool = True
    dropout: float = 0.0
    attention: Literal["auto", "cudnn"] = option("auto", affects="execution")
    residual: Residual = "float32"
    loss_rows: int | None = option(8192, affects="execution")

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if self.gelu not in _GELU:
            raise ValueError(f"gelu must be one of {sorted(_GELU)}, got {self.gelu!r}.")
        if self.attention not in ("auto", "cudnn"):
            raise ValueError(f"attention must be 'auto' or 'cudnn', got {self.attention!r}.")
        if self.residual not in get_args(Residual):
            raise ValueError(f"residual must be one of {', '.join(get_args(Residual))}, got {self.residual!r}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}. Give a fraction: 0.1, not 10.")
        if self.loss_rows is not None and self.loss_rows < 1:
            raise ValueError(f"loss_rows must be at least 1, got {self.loss_rows}. Use None for all at once.")


class GPT2(nn.Module):
    r"""The language model.

    .. math::
        x_0 &= W_e[\text{tokens}] + W_p, \qquad
        \text{logits} = W_h\, \mathrm{LN}(x_L) \\
        x_{l+1/2} &= x_l + \mathrm{Attention}(\mathrm{LN}(x_l)), \qquad
        x_{l+1} = x_{l+1/2} + \mathrm{MLP}(\mathrm{LN}(x_{l+1/2}))

    Weights are drawn from torch's global generator: :math:`\mathcal{N}(0, 0.02^2)`, and
    :math:`0.02 / \sqrt{2L}` for the ``c_proj`` that end a residual branch, L being ``layers``. Biases start at zero.

    Args:
        config: Shape of the model; None is the paper's.

    Example:
        >>> model = GPT2(GPT2Config(layers=2, heads=2, width=8, context=16, vocabulary=32))
        >>> model(torch.zeros(3, 16, dtype=torch.int64)).shape
        torch.Size([3, 16, 32])
    """

    def __init__(self, config: GPT2Config | None = None) -> None:
        super().__init__()
        self.config = config = GPT2Config() if config is None else config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        branch_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():  # a tied weight comes once
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=branch_std if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, ``(batch, sequence)`` of int64 to ``(batch, sequence, vocabulary)``."""
        logits: Tensor = self.lm_head(self.transformer(tokens))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over the targets that are not -100, without the logits in memory.

        Args:
            tokens: ``(batch, sequence)``.
            targets: Tokens that follow each, of the same shape.
        """
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must be shaped as tokens, {tuple(tokens.shape)}, got {tuple(targets.shape)}.")
        hidden = self.transformer(tokens).flatten(0, 1)
        return linear_cross_entropy(hidden, self.lm_head.weight, targets.flatten(), rows=self.config.loss_rows)

    def to_hugging_face(self) -> Any:
        """This model as a ``transformers.GPT2LMHeadModel``, with its own weights; biases it lacks are zeros there."""
        transformers = load_extra("transformers")
        config = self.config
        end_of_text = _END_OF_TEXT if config.vocabulary > _END_OF_TEXT else None  # a smaller vocabulary is not GPT-2's
        with torch.random.fork_rng(devices=[]):  # the weights are replaced: draw nothing that a caller would notice
            theirs = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_layer=config.layers,
                    n_head=config.heads,
                    n_embd=config.width,
                    n_positions=config.context,
                    vocab_size=config.vocabulary,
                    activation_function="gelu_new" if config.gelu == "tanh" else "gelu",
                    tie_word_embeddings=config.tied,
                    embd_pdrop=config.dropout,
                    attn_pdrop=config.dropout,
                    resid_pdrop=config.dropout,
                    layer_norm_epsilon=LAYER_NORM_EPS,
                    bos_token_id=end_of_text,
                    eos_token_id=end_of_text,
                )
            )
        weight = self.lm_head.weight
        theirs = theirs.to(weight.device, weight.dtype).train(self.training)
        ours = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for name, parameter in theirs.named_parameters():
            if name not in ours:
                assert name.endswith("bias"), name
                parameter.data.zero_()
            elif name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                parameter.data.copy_(ours[name].T)  # Conv1D stores (inputs, outputs)
            else:
                parameter.data.copy_(ours[name])
        return theirs


class Transformer(nn.Module):
    """Everything but the head: tokens ``(batch, sequence)`` to normalised states ``(batch, sequence, width)``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.prefers_cudnn = config.attention == "cudnn"
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.residual = AutocastPrecision() if config.residual == "autocast" else nn.Identity()
        self.h = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.ln_f = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS, bias=config.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """The states after the last norm."""
        if tokens.dim() != 2 or tokens.shape[1] > self.wpe.num_embeddings:
            raise ValueError(
                f"tokens must be (batch, sequence) with at most {self.wpe.num_embeddings} in a sequence, the model's "
                f"context, got shape {tuple(tokens.shape)}."
            )
        # A slice, not a lookup: its gradient is a sum over the batch instead of a scatter.
        x = self.residual(self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]))
        with (
            sdpa_kernel(_ATTENTION_WITH_CUDNN_FIRST, set_priority=True)
            if self.prefers_cudnn
            else contextlib.nullcontext()
        ):
            for block in self.h:
                x = block(x)
        states: Tensor = self.ln_f(x)
        return states


class Block(nn.Module):
    """Attention and MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream, ``(batch, sequence, width)``."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, sequence, width)``."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.resid_dropout(self.c_proj(attended.transpose(1, 2).flatten(2)))
        return out


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.gelu = _GELU[config.gelu]()
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, sequence, width)``."""
        out: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return out
