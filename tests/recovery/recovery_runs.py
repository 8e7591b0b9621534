"""Small models of every kind that is made sparse here, with data for each; and settings for short runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

import horst
from horst.recovery import SparsifyConfig, gathered
from horst.training import LoopConfig, perplexity
from horst.training.distributed import on_every_rank, rank, world_size

LOOP = LoopConfig(precision="float32", compile="off", clip_norm=1.0, log_every=1, checkpoint_every=3)
SHORT = {"steps": 6, "batch_size": 4, "samples": 8, "lr": 3e-3, "loop": LOOP}


def windows(rows: int = 24, length: int = 8, vocabulary: int = 50) -> Tensor:
    """Counting from a random number on: something that can be learnt."""
    first = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(1))
    return (first + torch.arange(length)) % vocabulary


def score(model: nn.Module) -> dict[str, float]:
    text = windows(8)
    found = perplexity(model, [(text[:, :-1], text[:, 1:])])
    return {"loss": found["loss"]}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


def llama() -> nn.Module:
    """Grouped queries and a tied head, as SmolLM2."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
        )
    )  # fmt: skip


def opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=50, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32, word_embed_proj_dim=16, layerdrop=0.0,
        )
    )  # fmt: skip


def _bert_config() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def bert() -> nn.Module:
    """Without a head; the loss does not reach its pooler."""
    return transformers.BertModel(_bert_config())


def classifier() -> nn.Module:
    return transformers.BertForSequenceClassification(_bert_config())


def vit() -> nn.Module:
    return timm.create_model(
        "deit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5
    )


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Plain(nn.Module):
    """A language model of nobody's library, with dropout."""

    def __init__(self, dropout: float = 0.1, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Residual(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def padded() -> dict[str, Tensor]:
    ids = windows()
    lengths = torch.arange(len(ids)) % 4 + 5
    return {"input_ids": ids, "attention_mask": (torch.arange(8) < lengths[:, None]).long()}


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(24, 3, 32, 32, generator=generator), torch.arange(24) % 5


MODELS = {
    "gpt2": (gpt2, windows),
    "llama": (llama, windows),
    "opt": (opt, windows),
    "bert": (bert, padded),
    "classifier": (classifier, lambda: {**padded(), "labels": torch.arange(24) % 3}),
    "vit": (vit, images),
    "plain": (Plain, windows),
}


def make(name: str, seed: int = 0):
    """A model with random weights that matter, and its data."""
    torch.manual_seed(seed)
    build, data = MODELS[name]
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
    return model.eval(), data()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class StoppingWindows:
    """Token windows as a source of batches that raises at batch ``stop``, as a process that dies does."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def batches(self, start: int):
        text = windows()
        for step in itertools.count(start):
            if step == self.stop:
                raise KeyboardInterrupt
            rows = text[torch.arange(4 * step, 4 * step + 4) % len(text)].chunk(world_size())[rank()]
            yield rows[:, :-1], rows[:, 1:]


def run_job(folder: Path, options: dict[str, Any]) -> None:
    """Make a model sparse, alone or with the other processes there are; its whole weights go to ``final.pt``.

    With ``stop``, a first call dies at that batch, and a second goes on.
    """
    name, stop = options["model"], options.get("stop")
    settings = {**SHORT, **{key: value for key, value in options.items() if key in SparsifyConfig.__annotations__}}
    settings["loop"] = dataclasses.replace(LOOP, accumulate=options.get("accumulate", 1))
    if stop is not None and stop >= 0:
        with contextlib.suppress(KeyboardInterrupt):
            horst.sparsify(_model(name), StoppingWindows(stop), directory=folder, **settings)
    model, data = _model(name), MODELS[name][1]() if stop is None else StoppingWindows(-1)
    report = horst.sparsify(model, data, directory=folder, **settings)
    state = gathered(model)
    kept = {layer.name: layer.kept for layer in report.layers.layers}
    assert all(other == kept for other in on_every_rank(lambda: kept))
    if rank() == 0:
        torch.save({"weights": state, "metrics": dict(report.after), "kept": kept}, folder / "final.pt")


def _model(name: str) -> nn.Module:
    """The same on every rank but for one tensor, which must become rank 0's; without dropout, whose units differ."""
    model, _ = make(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if rank():
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    return model
