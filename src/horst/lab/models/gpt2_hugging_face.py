"""Our GPT-2 to Hugging Face's and back: names agree, so it is a copy in which ``Conv1D`` weights are transposed."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor

from horst.extras import load_extra
from horst.lab.models.gpt2 import GPT2, LAYER_NORM_EPS, GPT2Config

_GELU: dict[str, Literal["exact", "tanh"]] = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_END_OF_TEXT = 50256


def from_hugging_face(source: Any, *, bias: bool = True) -> GPT2:
    """See :meth:`horst.lab.models.gpt2.GPT2.from_hugging_face`."""
    transformers = load_extra("transformers")
    if isinstance(source, str | os.PathLike):
        _check_convertible(transformers.AutoConfig.from_pretrained(source))
        source = transformers.GPT2LMHeadModel.from_pretrained(source)
    if not isinstance(source, transformers.GPT2LMHeadModel):
        raise ValueError(f"only a GPT2LMHeadModel or the folder of one can be converted, got {type(source).__name__}.")
    _check_convertible(source.config)
    theirs = {name: parameter.detach() for name, parameter in source.named_parameters()}
    nonzero = [name for name, parameter in theirs.items() if name.endswith("bias") and parameter.any()]
    if nonzero and not bias:
        raise ValueError(f"bias=False needs biases of zero, but {len(nonzero)} are not, such as {nonzero[0]}.")
    config = GPT2Config(
        layers=source.config.n_layer,
        heads=source.config.n_head,
        width=source.config.n_embd,
        context=source.config.n_positions,
        vocabulary=source.config.vocab_size,
        bias=bias,
        gelu=_GELU[source.config.activation_function],
        tied=source.config.tie_word_embeddings,
        dropout=source.config.resid_pdrop,
    )
    with torch.random.fork_rng(devices=[]):  # the weights are replaced: draw nothing that a caller would notice
        model = GPT2(config)
    model = model.to(source.device, source.dtype).train(source.training)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_transposed(name, theirs[name]))
    return model


def to_hugging_face(model: GPT2) -> Any:
    """See :meth:`horst.lab.models.gpt2.GPT2.to_hugging_face`."""
    transformers = load_extra("transformers")
    config = model.config
    end_of_text = _END_OF_TEXT if config.vocabulary > _END_OF_TEXT else None  # a smaller vocabulary is not GPT-2's
    with torch.random.fork_rng(devices=[]):
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
    weight = model.lm_head.weight
    theirs = theirs.to(weight.device, weight.dtype).train(model.training)
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in theirs.named_parameters():
        if name in ours:
            parameter.data.copy_(_transposed(name, ours[name]))
        else:
            assert name.endswith("bias"), name
            parameter.data.zero_()
    return theirs


def _transposed(name: str, weight: Tensor) -> Tensor:
    """Between ``nn.Linear`` and ``Conv1D``, which stores (inputs, outputs), either way."""
    is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return weight.T if is_conv1d else weight


def _check_convertible(config: Any) -> None:
    """Refuse what :class:`GPT2Config` has no field for, by the name of the setting."""
    if config.model_type != "gpt2":
        raise ValueError(f"only GPT-2 can be converted (model_type 'gpt2'), got model_type {config.model_type!r}.")
    if config.activation_function not in _GELU:
        raise ValueError(f"activation_function must be one of {sorted(_GELU)}, got {config.activation_function!r}.")
    needed = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "layer_norm_epsilon": LAYER_NORM_EPS,
    }
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ValueError(f"this GPT-2 has {name}={getattr(config, name)}; only {value} can be converted.")
    if config.n_inner not in (None, 4 * config.n_embd):
        raise ValueError(f"n_inner must be 4 * n_embd = {4 * config.n_embd}, got {config.n_inner}.")
    if len({config.embd_pdrop, config.attn_pdrop, config.resid_pdrop}) > 1:
        raise ValueError(
            f"embd_pdrop, attn_pdrop and resid_pdrop must be one number, got {config.embd_pdrop}, {config.attn_pdrop} "
            f"and {config.resid_pdrop}. Set them alike before converting."
        )
