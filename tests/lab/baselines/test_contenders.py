"""Every contender: made alike, true to its formula, trains and resumes."""

import copy
import dataclasses
import importlib.util
import json
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

import horst
from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.data.tokenization import tokenize
from horst.lab.experiments import language_model
from horst.lab.experiments.language_model import LanguageConfig, train_language_model
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.vision_model import train_sparse_vision_model
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.sparsity import find_layers
from horst.training import LoopConfig, processes

SHAPE = GPT2Config(layers=2, heads=2, width=16, context=16, vocabulary=257)
NAMES = [name for name in get_args(Name) if name != "pat" or importlib.util.find_spec("torchao")]
#: Learning rates of the matrices, where they are not Adam's.
OWN_LR = {"madam": 0.01, "lmd": 0.02, "linbreg": 0.3, "scion": 2.0**-10}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    text = folder / "text.jsonl"
    documents = [{"id": i, "text": f"{i} is followed by {i + 1}, and {i + 1} by {i + 2}. " * 8} for i in range(40)]
    text.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return tokenize(text, folder / "tokens", tokenizer="bytes", validation=0.1)


def settings(tokens, **changes):
    base = LanguageConfig(
        data=tokens,
        model=SHAPE,
        optimization=Optimization(lr=3e-3, betas=(0.9, 0.95)),
        loop=LoopConfig(precision="float32", clip_norm=1.0, checkpoint_every=3, log_every=1),
        steps=8,
        batch_size=4,
        warmup_steps=2,
    )
    return dataclasses.replace(base, **changes)


# PAT keeps its threshold in the groups, which checkpoints do not hold
@pytest.mark.parametrize("name", [name for name in NAMES if name != "pat"])
def test_a_contender_learns_and_resumes_bit_for_bit(name, tokens, tmp_path, monkeypatch):
    # MADAM's own learning rate is for thousands of steps
    optimization = Optimization(lr=3e-3, betas=(0.9, 0.95), matrix_lr=0.1 if name == "madam" else None)
    config = settings(tokens, steps=20, optimization=optimization)
    with processes("cpu") as world:
        model, whole = train_language_model(config, name, 0, tmp_path / "whole", world)
        losses = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in losses if "loss" in line]
        assert losses[-1] < losses[0] - 0.1

        calls, original = [], language_model._loss

        def breaks(model, tokens, targets):
            calls.append(1)
            if len(calls) == 11:
                raise RuntimeError("the power went")
            return original(model, tokens, targets)

        monkeypatch.setattr(language_model, "_loss", breaks)
        with pytest.raises(RuntimeError, match="the power went"):
            train_language_model(config, name, 0, tmp_path / "broken", world)
        monkeypatch.setattr(language_model, "_loss", original)
        resumed, after = train_language_model(config, name, 0, tmp_path / "broken", world)
    assert after.step == whole.step == 20
    assert list(resumed.state_dict()) == list(GPT2(SHAPE).state_dict()), "the model has weights and nothing else"
    assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_contenders_train_different_models_from_the_same_start(tokens, tmp_path):
    with processes("cpu") as world:
        found = {name: train_language_model(settings(tokens), name, 0, tmp_path / name, world)[1] for name in NAMES}
    assert len({result.metrics["perplexity"] for result in found.values()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_one_group_and_decays_alike(name):
    model = GPT2(SHAPE)
    optimizer = Optimization(weight_decay=0.1, spred_decay=0.7).make(model, name, steps=10)
    chosen = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert set(chosen) == {id(p) for p in model.parameters()}
    for parameter, p in model.named_parameters():
        block = p.dim() == 2 and ".h." in parameter
        own = block if name == "linbreg" else p.dim() == 2
        assert chosen[id(p)]["lr"] == (OWN_LR.get(name, 1e-3) if own else 1e-3), parameter
        # what has its own regulariser does not decay
        decays = {"spred": 0.7, "dwf": 0.7, **dict.fromkeys(("pilot", "madam", "linbreg", "adabreg", "scion"), 0.0)}
        assert chosen[id(p)].get("weight_decay", 0.0) == (decays.get(name, 0.1) if block else 0.0), parameter


def test_the_penalty_goes_where_the_mirror_step_would():
    model = GPT2(SHAPE)
    blocks = {id(layer.param) for layer in find_layers(model, "blocks")}
    for name, field in (("adamw-penalty", "penalty"), ("adamw-l1", "l1")):
        for changes in ({"mirror": "blocks"}, {"no_mirror": ("embedding", "position")}):
            optimizer = Optimization(**{field: 0.3}, **changes).make(model, name)
            penalised = {id(p): g["l1"] for g in optimizer.param_groups for p in g["params"] if "l1" in g}
            assert set(penalised) == blocks
            assert set(penalised.values()) == {0.3}


@pytest.mark.parametrize("name", ["adamw", "adamw-l1"])
def test_norm_layers_step_by_their_ratio_and_decay_as_the_others(name):
    torch.manual_seed(0)
    start = GPT2(SHAPE).double()
    with torch.no_grad():  # so that their decay can be seen
        for p in start.parameters():
            p.mul_(3.0)
    found = {}
    for ratio in (1.0, 6.0):
        given = Optimization(lr=0.01, weight_decay=0.5, decay="all", mirror="blocks", l1=0.2, norm_lr_ratio=ratio)
        model = copy.deepcopy(start)
        optimizer = given.make(model, name)
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
        optimizer.step()
        found[ratio] = dict(model.named_parameters())
    for key, p in start.named_parameters():
        one, six = found[1.0][key].detach(), found[6.0][key].detach()
        if p.dim() == 1:
            decayed = p.detach() * (1 - 0.01 * 0.5)
            assert_close(six - decayed, 6 * (one - decayed), rtol=1e-9, atol=1e-12)
            assert not torch.equal(one, decayed)
        else:
            assert_close(six, one, rtol=0, atol=0)


def test_embeddings_and_positions_of_adamw_may_have_a_learning_rate_of_their_own():
    model = GPT2(SHAPE)
    given = Optimization(lr=0.01, weight_decay=0.5, decay="all", norm_lr_ratio=6.0, embedding_lr_ratio=4.0)
    optimizer = given.make(model, "adamw")
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, rate in found.items():
        ratio = 4.0 if ".wte." in name or ".wpe." in name else 6.0 if ".ln_" in name else 1.0
        assert rate == pytest.approx((0.01 * ratio, 0.5 / ratio)), name


def test_horst_without_a_mirror_step_and_with_a_bound_is_adamw_at_the_bound():
    torch.manual_seed(0)
    start = GPT2(SHAPE).double()
    found = {}
    for name, given in (
        ("horst-l1", Optimization(lr=0.01, alpha=0.0, l1=0.5, max_step=0.002, decay="all")),
        ("adamw-l1", Optimization(lr=0.002, l1=0.5, mirror="blocks", decay="all")),
    ):
        model = copy.deepcopy(start)
        optimizer = given.make(model, name)
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * step + i)
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            optimizer.step()
        found[name] = model
    for p, q in zip(found["horst-l1"].parameters(), found["adamw-l1"].parameters(), strict=True):
        assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-12)


def test_only_another_ratio_of_the_norm_layers_is_said_in_a_row():
    assert Optimization(norm_lr_ratio=6.0).about("adamw")["norm_lr_ratio"] == 6.0
    assert "norm_lr_ratio" not in Optimization().about("adamw")
    assert "norm_lr_ratio" not in Optimization(norm_lr_ratio=6.0).about("horst")


# Under Muon too the threshold is that of the group's learning rate, without the factor that scales its updates.
@pytest.mark.parametrize(
    ("shrunk", "plain", "ratio"),
    [("horst-l1", "horst", 1.0), ("muon-l1", "muon", 2.0), ("horst-muon-l1", "horst-muon", 2.0)],
)
def test_with_l1_it_is_the_step_without_and_then_the_soft_threshold_of_the_blocks(shrunk, plain, ratio):
    torch.manual_seed(0)
    ours = GPT2(SHAPE).double()
    theirs = GPT2(SHAPE).double()
    theirs.load_state_dict(ours.state_dict())
    common = Optimization(lr=0.01, alpha=4.0, mirror="all", l1=0.5, muon_lr_ratio=ratio)
    made = {name: common.make(model, name) for name, model in ((shrunk, ours), (plain, theirs))}
    for _ in range(3):
        for name, model in ((shrunk, ours), (plain, theirs)):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
            made[name].step()
        blocks = {id(layer.param) for layer in find_layers(theirs, "blocks")}
        with torch.no_grad():
            for p in theirs.parameters():
                if id(p) in blocks:
                    p.copy_(p.sign() * (p.abs() - 0.005 * ratio).clamp(min=0))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-14)
    assert any((layer.param == 0).any() for layer in find_layers(ours, "blocks"))


def test_muon_l1_horst_is_muon_l1_in_the_blocks_and_horst_elsewhere():
    torch.manual_seed(0)
    start = GPT2(SHAPE).double()
    models = {name: GPT2(SHAPE).double() for name in ("muon-l1-horst", "muon-l1", "horst")}
    common = Optimization(lr=0.01, alpha=4.0, mirror="all", l1=0.5)
    for name, model in models.items():
        model.load_state_dict(start.state_dict())
        optimizer = common.make(model, name)
        for _ in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
            optimizer.step()
    blocks = {id(layer.param) for layer in find_layers(models["muon-l1-horst"], "blocks")}
    for ours, by_muon, by_horst in zip(*(model.parameters() for model in models.values()), strict=True):
        assert_close(ours.detach(), (by_muon if id(ours) in blocks else by_horst).detach(), rtol=0, atol=0)
    gains = [p for p in models["muon-l1-horst"].parameters() if p.dim() == 1]
    theirs = [p for p in models["muon-l1"].parameters() if p.dim() == 1]
    assert any(not torch.equal(p, q) for p, q in zip(gains, theirs, strict=True))  # AdamW's there


def test_horst_muon_l1_makes_exact_zeros_in_the_blocks_and_nowhere_else(tokens, tmp_path):
    config = settings(tokens, steps=40, optimization=Optimization(lr=4e-3, betas=(0.9, 0.95), alpha=20.0, l1=1.0))
    with processes("cpu") as world:
        model, _ = train_language_model(config, "horst-muon-l1", 0, tmp_path, world)
    blocks = {id(layer.param) for layer in find_layers(model, "blocks")}
    for name, p in model.named_parameters():
        assert bool((p == 0).any()) == (id(p) in blocks), name


def test_horst_muon_l1_without_l1_is_horst_muon(tokens, tmp_path):
    config = settings(tokens, optimization=Optimization(lr=4e-3, betas=(0.9, 0.95), alpha=20.0, l1=0.0))
    with processes("cpu") as world:
        found = {
            name: train_language_model(config, name, 0, tmp_path / name, world)[0].state_dict()
            for name in ("horst-muon", "horst-muon-l1")
        }
    assert_close(found["horst-muon-l1"], found["horst-muon"], rtol=0, atol=0)


def test_horst_over_muon_is_muons_step_and_then_the_mirror_step():
    torch.manual_seed(0)
    ours = GPT2(SHAPE).double()
    theirs = GPT2(SHAPE).double()
    theirs.load_state_dict(ours.state_dict())
    common = Optimization(lr=0.01, alpha=4.0, muon_lr_ratio=2.0, weight_decay=0.3)
    made = {"horst-muon": (ours, common.make(ours, "horst-muon")), "muon": (theirs, common.make(theirs, "muon"))}
    for model, optimizer in made.values():
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    assert {g["lr"] for g in made["muon"][1].param_groups} == {0.01, 0.02}
    halves = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        half = halves[name].detach()
        if p.dim() == 2:  # matrices by Muon, embeddings by Adam: both get the mirror step
            decay = 0.02 * 0.3 if ".h." in name else 0.0
            u = (1 - decay) * before[name] - half
            half = half * torch.exp(-4.0 * half.sign() * u)
        assert_close(p.detach(), half, rtol=1e-9, atol=1e-12)
    moved = before["transformer.h.0.mlp.c_fc.weight"] - halves["transformer.h.0.mlp.c_fc.weight"].detach()
    assert moved.square().mean().sqrt() == pytest.approx(0.2 * 0.02, rel=0.3), "as large as AdamW's"


def test_the_hyperbolic_map_is_the_dual_step_of_its_entropy_along_adams_direction():
    torch.manual_seed(0)
    model = GPT2(SHAPE).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimization(lr=0.01, alpha=4.0, weight_decay=0.3, eps=0.0).make(model, "hyperbolic")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        theta, u = before[name], 0.01 * p.grad.sign()  # Adam's first step
        decay = 0.01 * 0.3 * theta if p.dim() == 2 and ".h." in name else 0.0
        mirrored = torch.sinh(torch.asinh(4.0 * theta) - 4.0 * u) / 4.0
        expected = (mirrored if p.dim() == 2 else theta - u) - decay
        assert_close(p.detach(), expected, rtol=1e-9, atol=1e-12)


def test_scion_has_two_kinds_of_balls_and_leaves_vectors_to_adamw():
    model = GPT2(SHAPE)
    optimizer = Optimization(scion_radius=10.0).make(model, "scion")
    chosen = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter, p in model.named_parameters():
        group = chosen[id(p)]
        if p.dim() == 2:
            block = ".h." in parameter
            assert (group["radius"], group["sign"]) == ((10.0, False) if block else (600.0, True)), parameter
        else:
            assert "betas" in group


def test_cast_ends_at_its_target_sparsity_and_needs_the_number_of_steps(tokens, tmp_path):
    config = settings(tokens, optimization=Optimization(lr=3e-3, target_sparsity=0.6))
    with processes("cpu") as world:
        model, _ = train_language_model(config, "cast", 0, tmp_path, world)
    for layer in find_layers(model, "blocks"):
        assert int((layer.param == 0).sum()) == pytest.approx(0.6 * layer.param.numel(), abs=1)
    with pytest.raises(ValueError, match=r"give make\(\.\.\., steps="):
        Optimization().make(model, "cast")
    assert Optimization().masks(model, Optimization().make(model, "adamw"), "adamw") is None


def test_dwf_and_linbreg_begin_with_weights_of_their_own():
    for name in ("dwf", "linbreg", "adabreg"):
        torch.manual_seed(0)
        model = GPT2(SHAPE)
        before = {layer.name: layer.param.detach().clone() for layer in find_layers(model, "blocks")}
        Optimization(bregman_density=0.25).make(model, name)
        for layer in find_layers(model, "blocks"):
            assert (layer.param != before[layer.name]).any()
            zeros = float((layer.param == 0).float().mean())
            assert zeros == (0.0 if name == "dwf" else pytest.approx(0.75, abs=0.06))


@pytest.mark.parametrize("name", ["sign-in", "adabreg", "cast"])
def test_contenders_train_vision_models_with_masks(name, tmp_path):
    config = RECIPES["table1"].scales["cpu"]().run
    optimization = dataclasses.replace(config.optimization, mirror="blocks")
    config = dataclasses.replace(config, epochs=4, batch_size=256, optimization=optimization)
    with processes("cpu") as world:
        model, _, found = train_sparse_vision_model(config, name, 0.8, 0, tmp_path, world)
    assert found["zeros"] == pytest.approx(0.8 * found["masked_weights"], rel=0.01)
    assert sum(int((layer.param == 0).sum()) for layer in find_layers(model, "blocks")) >= found["zeros"]


def test_a_contender_recovers_a_pruned_model():
    torch.manual_seed(0)
    model = GPT2(SHAPE)
    windows = torch.randint(257, (32, 16))
    loop = LoopConfig(precision="float32", compile="off")
    report = horst.sparsify(
        model, windows, sparsity=0.5, optimizer=lambda model: Optimization(lr=1e-3).make(model, "sign-in"), steps=4,
        batch_size=8, samples=8, distill="none", loop=loop,
    )  # fmt: skip
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
