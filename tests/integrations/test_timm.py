"""timm's factory and registry: HORST by name, timm's groups, its script's arguments."""

import argparse
import functools
import subprocess
import sys

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers, optimizer_kwargs
from timm.scheduler import CosineLRScheduler
from timm.utils import ParseKwargs

import horst.integrations.timm  # puts the names into timm's registry
from horst import HAM, HORST, param_groups


def vit():
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **sizes, embed_dim=12, depth=2, num_heads=2)


def train(model, optimizer, steps=3):
    for k in range(steps):
        x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def assert_same(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_names_are_listed_with_a_description():
    assert {"horst", "ham"} <= set(list_optimizers())
    assert get_optimizer_info("horst").has_betas
    assert "mirror step" in dict(list_optimizers(with_description=True))["horst"]
    assert isinstance(create_optimizer_v2(vit(), "horst"), HORST)
    assert isinstance(create_optimizer_v2(vit(), "ham", lr=1e-3), HAM)


def test_timms_groups_decay_and_matrices_are_mirrored():
    by_name, by_hand = vit(), vit()
    skipped = by_hand.no_weight_decay()
    assert "pos_embed" in skipped  # no decay, but a matrix
    groups = {}
    for name, p in by_hand.named_parameters():
        decays, mirrors = p.ndim > 1 and name not in skipped, p.ndim > 1
        options = {"params": [], "weight_decay": 0.1 * decays, "alpha": 5.0 * mirrors, "beta": 0.01 * mirrors}
        groups.setdefault((decays, mirrors), options)["params"].append(p)
    assert len(groups) == 3
    train(by_hand, HORST(groups.values(), lr=5e-3))
    options = {"lr": 5e-3, "weight_decay": 0.1, "alpha": 5.0, "beta": 0.01}
    train(by_name, create_optimizer_v2(by_name, "horst", **options))
    assert_same(by_name, by_hand)


def test_what_is_mirrored_is_what_param_groups_mirrors():
    model = vit()
    by_table = {row.name for row in param_groups(model, mirror="matrices").rows if row.mirror}
    optimizer = create_optimizer_v2(model, "horst", weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    chosen = set()
    for group in optimizer.param_groups:
        mirrored = optimizer._choose_mirrored(group, group["params"])
        chosen |= {names[id(p)] for p, mirrors in zip(group["params"], mirrored, strict=True) if mirrors}
    assert chosen == by_table


def test_groups_and_checkpoints_are_adamws():
    model = vit()
    ours, adamw = (create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.1) for name in ("horst", "adamw"))
    assert [len(g["params"]) for g in ours.param_groups] == [len(g["params"]) for g in adamw.param_groups]
    train(model, adamw)
    ours.load_state_dict(adamw.state_dict())
    assert ours.param_groups[1]["alpha"] == 5.0


def test_without_mirror_step_it_is_adamw():
    ours, adamw = vit(), vit()
    options = {"lr": 1e-3, "weight_decay": 0.1, "foreach": False}
    train(ours, create_optimizer_v2(ours, "horst", alpha=0.0, **options))
    train(adamw, create_optimizer_v2(adamw, "adamw", **options))
    assert_same(ours, adamw)


def test_layer_decay_scales_the_mirror_step_with_the_rate():
    model, by_hand = vit(), vit()
    optimizer = create_optimizer_v2(model, "horst", lr=1e-2, weight_decay=0.1, alpha=5.0, layer_decay=0.5)
    scheduler = CosineLRScheduler(optimizer, t_initial=10)  # multiplies by lr_scale
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    assert rates[-1] == 1e-2
    assert rates[0] == pytest.approx(1e-2 * 0.5**3)  # head, two blocks, embeddings
    scheduler.step(0)
    names = {id(p): name for name, p in model.named_parameters()}
    there = dict(by_hand.named_parameters())
    groups = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "alpha": 5.0 * (p.ndim > 1)}
            groups.append({"params": [there[names[id(p)]]], **options})
    train(by_hand, HORST(groups))
    train(model, optimizer)
    assert_same(model, by_hand)


def test_groups_of_ours_go_through_param_group_fn():
    groups = functools.partial(param_groups, weight_decay=0.1, alpha=5.0, mirror="blocks")
    optimizer = create_optimizer_v2(vit(), "horst", lr=1e-3, param_group_fn=groups)
    assert [(g["weight_decay"], g["alpha"]) for g in optimizer.param_groups] == [(0.1, 5.0), (0.1, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("options", [{"mirror": "all"}, {"mirror": "blocks"}, {"no_mirror": ["head"]}], ids=str)
def test_groups_of_ours_are_stepped_as_horst_steps_them(options):
    """Norms and biases too, where param_groups gives them the mirror step."""
    groups = functools.partial(param_groups, weight_decay=0.1, alpha=5.0, beta=0.01, **options)
    by_name, by_hand = vit(), vit()
    train(by_name, create_optimizer_v2(by_name, "horst", lr=5e-3, param_group_fn=groups))
    train(by_hand, HORST(groups(by_hand), lr=5e-3))
    assert_same(by_name, by_hand)


def test_arguments_of_timms_script():
    parser = argparse.ArgumentParser()  # the options of train.py that concern the optimizer, with its defaults
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--opt-eps", default=None, type=float)
    parser.add_argument("--opt-betas", default=None, type=float, nargs="+")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=2e-5)
    parser.add_argument("--layer-decay", type=float, default=None)
    parser.add_argument("--opt-kwargs", nargs="*", default={}, action=ParseKwargs)
    parser.add_argument("--lr", type=float, default=None)
    line = "--opt horst --lr 5e-3 --weight-decay 0.1 --opt-betas 0.9 0.95 --opt-kwargs alpha=7 beta=1e-2 l1=0.1"
    args = parser.parse_args(line.split())
    model = vit()
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    group = optimizer.param_groups[1]
    expected = {"lr": 5e-3, "alpha": 7, "beta": 1e-2, "betas": [0.9, 0.95], "l1": 0.1, "weight_decay": 0.1}
    assert {key: group[key] for key in expected} == expected
    train(model, optimizer)


def test_a_script_is_started_through_the_module(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'horst'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport beside\nfrom timm.optim import get_optimizer_info\n"
        "assert __name__ == '__main__'\n"
        "print(get_optimizer_info(beside.NAME).opt_class.__name__, *sys.argv[1:])\n"
    )
    command = [sys.executable, "-W", "error", "-m", "horst.integrations.timm", str(script), "--opt", "horst"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "MatrixHORST --opt horst\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "start"), [([], "Usage: "), (["no.py"], "no.py is not a file. Usage: python -m")]
)
def test_a_script_that_is_not_there_gets_a_line(arguments, start):
    with pytest.raises(SystemExit, match=f"^{start}"):
        horst.integrations.timm._run_script(arguments)
