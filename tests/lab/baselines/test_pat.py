"""PAT of torchao: called as its documentation says, or named where it is missing."""

import sys
import types

import pytest
import torch

from horst.lab.baselines.contenders import Optimization
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.sparsity import find_layers

SHAPE = GPT2Config(layers=2, heads=2, width=16, context=16, vocabulary=257)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.prototype.pat.optim", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"'pat' needs the package torchao with torchao\.prototype\.pat"):
        Optimization().make(GPT2(SHAPE), "pat")


def test_the_block_matrices_get_the_proximal_map(monkeypatch):
    """With a stand-in for the package, which records what it is given."""
    given = []

    def prune_optimizer(base, *, warmup_steps):
        given.append(base)
        return base

    for name in ("torchao", "torchao.prototype", "torchao.prototype.pat"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    optim = types.ModuleType("torchao.prototype.pat.optim")
    optim.PruneOptimizer = prune_optimizer
    monkeypatch.setitem(sys.modules, "torchao.prototype.pat.optim", optim)
    model = GPT2(SHAPE)
    Optimization(lr=2e-3, l1=0.03).make(model, "pat")
    (base,) = given
    assert isinstance(base, torch.optim.AdamW)
    pruned = {id(p) for group in base.param_groups if group.get("reg_lambda") == 0.03 for p in group["params"]}
    assert pruned == {id(layer.param) for layer in find_layers(model, "blocks")}
    kinds = {(group.get("prox_type"), group.get("group_type")) for group in base.param_groups}
    assert kinds == {("ProxLasso", "ElemGrouper"), (None, None)}
