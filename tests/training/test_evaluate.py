"""Perplexity and accuracy against plain formulas in float64."""

import math
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from horst.training import accuracy, perplexity

VOCABULARY = 11


class Bigram(nn.Module):
    """Logits depend on the present token; with dropout, to see that it is off."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        return self.dropout(self.table(tokens))


class WithLogits(Bigram):
    def forward(self, tokens):
        return types.SimpleNamespace(logits=super().forward(tokens), loss=None)


class WithLoss(Bigram):
    def loss(self, tokens, targets):
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())  # NaN where nothing is scored

    def forward(self, tokens):
        raise AssertionError("logits are not needed")


def text(rows, scored=0.7):
    tokens = torch.randint(VOCABULARY, (rows, 9))
    targets = torch.randint(VOCABULARY, (rows, 9))
    return tokens, torch.where(torch.rand(rows, 9) < scored, targets, -100)


@pytest.mark.parametrize("kind", [Bigram, WithLogits, WithLoss])
@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_perplexity_weighs_tokens_alike_whatever_the_batches(kind, sizes, seed):
    torch.manual_seed(seed)
    model = kind()
    tokens, targets = text(sum(sizes))
    targets[0, 0] = 3  # one to score at least
    logits = model.table.weight.detach().double()[tokens]
    reference = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()
    # A batch in which nothing is scored adds nothing.
    batches = [*zip(tokens.split(sizes), targets.split(sizes), strict=True), (tokens[:1], torch.full((1, 9), -100))]
    seen = []
    found = perplexity(model, batches, progress=seen.append)
    assert found["loss"] == pytest.approx(reference, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(reference), rel=1e-5)
    assert found["tokens"] == (targets != -100).sum()
    assert seen == [*range(1, len(batches) + 1)]


def test_hugging_face_models_and_extra_fields_of_a_batch():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=9, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    tokens, targets = text(3)
    scored = (targets != -100).sum(1)
    with torch.no_grad():
        logits = model.eval()(tokens).logits.double()
    reference = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()
    assert perplexity(model, [(tokens, targets, scored)])["loss"] == pytest.approx(reference, rel=1e-6)


def test_a_criterion_kept_as_loss_is_not_the_models_own_loss():
    model = Bigram()
    tokens = torch.randint(VOCABULARY, (2, 6))
    expected = perplexity(model, [(tokens[:, :-1], tokens[:, 1:])])
    model.loss = nn.CrossEntropyLoss()
    assert perplexity(model, [(tokens[:, :-1], tokens[:, 1:])]) == expected


def test_evaluation_is_repeatable_and_leaves_modes_and_random_numbers_alone():
    model = Bigram().train()
    model.table.eval()
    before = torch.get_rng_state()
    batches = [text(4)]
    torch.set_rng_state(before)
    assert perplexity(model, batches) == perplexity(model, batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.dropout.training
    assert not model.table.training


def test_bf16_runs_under_autocast_and_agrees_roughly():
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    batches = [text(4)]
    full, half = (perplexity(model, batches, precision=p)["loss"] for p in ("float32", "bf16"))
    assert half != full
    assert half == pytest.approx(full, rel=2e-2)


def test_a_precision_that_is_none_is_refused():
    model, batches = torch.nn.Linear(4, 3), [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(ValueError, match="precision must be one of 'bf16', 'float32', got 'fp16'"):
        accuracy(model, batches, precision="fp16")


@given(seed=st.integers(0, 200), classes=st.integers(2, 12), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_accuracy_is_that_of_a_stable_sort(seed, classes, sizes):
    torch.manual_seed(seed)
    logits = torch.randn(sum(sizes), classes).mul(2).round()  # with ties
    targets = torch.randint(classes, (sum(sizes),))
    ranked = logits.sort(dim=1, descending=True, stable=True).indices
    hits = ranked == targets[:, None]
    found = accuracy(nn.Identity(), zip(logits.split(sizes), targets.split(sizes), strict=True))
    assert found["top1"] == pytest.approx(hits[:, :1].any(1).double().mean().item())
    assert found["top5"] == pytest.approx(hits[:, :5].any(1).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-5)
    assert found["images"] == len(targets)


def test_a_model_that_gives_nan_is_right_about_nothing():
    logits = torch.full((4, 3), float("nan"))
    assert accuracy(nn.Identity(), [(logits, torch.zeros(4, dtype=torch.int64))])["top5"] == 0.0


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "no batches"),
        ([(torch.zeros(1, 9, dtype=torch.int64), torch.full((1, 9), -100))], ValueError, "no target to score"),
    ],
)
def test_nothing_to_evaluate_is_an_error(batches, error, message):
    with pytest.raises(error, match=message):
        perplexity(Bigram(), batches)


def test_a_model_that_gives_no_logits_is_named():
    class Odd(nn.Module):
        def forward(self, x):
            return {"scores": x}

    with pytest.raises(TypeError, match=r"must give logits, or an output with .logits, got dict"):
        accuracy(Odd(), [(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))])
