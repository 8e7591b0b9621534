"""Pruned mixture models come back from files as they were; what stays dense is said."""

import pytest
import safetensors
import torch

from horst.export import load_pretrained, load_sparse, save_hugging_face, save_sparse, sparsify
from horst.pruning import prune


def test_a_pruned_mixture_round_trips_through_a_sparse_file(mixture, tmp_path):
    prune(mixture, 0.75)
    path = save_sparse(mixture, tmp_path / "model.sparse.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        assert {f"{name}::bitmask" for name, p in mixture.named_parameters() if p.dim() == 3} <= set(file.keys())
    dense = {name: p.detach().clone() for name, p in mixture.named_parameters()}
    with torch.no_grad():
        for p in mixture.parameters():
            p.fill_(7.0)
    load_sparse(path, mixture)
    assert all(torch.equal(p, dense[name]) for name, p in mixture.named_parameters())


@pytest.mark.parametrize("sparse", [True, False])
def test_a_pruned_mixture_round_trips_through_a_directory(mixture, tmp_path, sparse):
    prune(mixture, pattern="2:4")
    loaded = load_pretrained(save_hugging_face(mixture, tmp_path / "pruned", sparse=sparse))
    assert type(loaded) is type(mixture)
    for (name, p), (other, q) in zip(mixture.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p, q), name


def test_sparsify_says_that_experts_stay_dense(mixture, caplog):
    weights = sum(p.numel() for p in mixture.parameters() if p.dim() == 3)
    tokens = torch.randint(50, (2, 8))
    expected = mixture(tokens).logits
    sparsify(mixture)
    assert f"4 stacks of experts ({weights} weights) stay dense" in caplog.text
    torch.testing.assert_close(mixture(tokens).logits, expected)
