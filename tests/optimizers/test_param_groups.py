"""param_groups on real models: which tensors get decay and the mirror step."""

import pytest
import timm
import torch
import transformers
from torch import nn

from horst import HORST, param_groups
from horst.parameters.kinds import parameter_kinds
from horst.sparsity import find_layers


@pytest.fixture(scope="module")
def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def deit():
    return timm.create_model("deit_tiny_patch16_224", num_classes=10, depth=2)


def kinds_of(model):
    by_kind = {}
    for name, kind in parameter_kinds(model).items():
        by_kind.setdefault(kind, set()).add(name)
    return by_kind


def test_kinds_of_gpt2(gpt2):
    kinds = kinds_of(gpt2)
    assert kinds["embedding"] == {"transformer.wte.weight"}  # tied to the head: an embedding first of all
    assert kinds["position"] == {"transformer.wpe.weight"}
    assert "head" not in kinds
    assert len(kinds["matrix"]) == 2 * 4
    assert kinds["norm"] == {n for n, _ in gpt2.named_parameters() if ".ln_" in n}


def test_kinds_of_llama(llama):
    kinds = kinds_of(llama)
    assert kinds["embedding"] == {"model.embed_tokens.weight"}
    assert kinds["head"] == {"lm_head.weight"}
    assert len(kinds["matrix"]) == 2 * 7
    assert kinds["norm"] == {n for n, _ in llama.named_parameters() if "norm" in n}


def test_kinds_of_deit(deit):
    kinds = kinds_of(deit)
    assert kinds["position"] == {"cls_token", "pos_embed"}
    assert kinds["head"] == {"head.weight"}
    assert kinds["matrix"] == {"patch_embed.proj.weight"} | {
        f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }


@pytest.mark.parametrize("mirror", ["matrices", "blocks", "all"])
def test_every_trainable_parameter_is_in_one_group(gpt2, llama, deit, mirror):
    for model in (gpt2, llama, deit):
        groups = param_groups(model, weight_decay=0.1, alpha=5.0, mirror=mirror)
        ids = [id(p) for g in groups for p in g["params"]]
        assert sorted(ids) == sorted(id(p) for p in model.parameters())
        HORST(groups)  # an optimizer takes them


def rule(model, **options):
    rows = param_groups(model, weight_decay=0.1, alpha=5.0, **options).rows
    return {r.name for r in rows if r.decay}, {r.name for r in rows if r.mirror}


def test_the_model_alone_gets_horsts_own_defaults(gpt2):
    groups = HORST(param_groups(gpt2)).param_groups
    options = ("alpha", "beta", "l1")
    own = HORST(gpt2.parameters()).param_groups[0]
    for group in groups:
        assert {name: group[name] for name in options} == {name: own[name] for name in options}
    assert {group["weight_decay"] for group in groups} == {own["weight_decay"], 0.0}


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": "auto"}, {"l1": 0.5}, {"beta": 0.1}])
def test_an_option_that_every_group_overrides_is_told(gpt2, options):
    with pytest.warns(UserWarning, match=rf"{next(iter(options))}=.* has no effect: every parameter group"):
        HORST(param_groups(gpt2, l1=0.01), **options)
    HORST(param_groups(gpt2, l1=0.01, alpha=0.0), alpha=0.0)  # the same: silent, since warnings are errors here
    HORST(param_groups(gpt2), l1=0.5)  # these groups carry none


def test_all_options_that_every_group_overrides_are_told_at_once(gpt2):
    with pytest.warns(UserWarning, match="has no effect|have no effect") as found:
        HORST(param_groups(gpt2, l1=0.01), alpha="auto", l1=0.02)
    (warning,) = found
    assert str(warning.message) == (
        "alpha='auto' and l1=0.02 have no effect: every parameter group carries its own alpha and l1. Give alpha and "
        "l1 to horst.param_groups, or set them in the groups."
    )


def test_an_option_that_acts_beside_one_that_does_not_is_told(gpt2):
    with pytest.warns(UserWarning, match="^alpha='auto' has no effect") as found:
        optimizer = HORST(param_groups(gpt2), alpha="auto", l1=0.02)
    (warning,) = found
    assert str(warning.message).endswith(
        " l1=0.02 does have one, on all tensors; horst.param_groups limits it to block matrices."
    )
    assert {group["l1"] for group in optimizer.param_groups} == {0.02}


def test_an_option_that_one_group_leaves_open_is_no_mistake(gpt2):  # warnings are errors here
    first, *rest = gpt2.parameters()
    optimizer = HORST([{"params": [first], "alpha": 1.0}, {"params": rest}], alpha=2.0)
    assert [group["alpha"] for group in optimizer.param_groups] == [1.0, 2.0]


def test_default_mirrors_everything_as_the_class_does(gpt2, deit):
    for model in (gpt2, deit):
        _, mirrored = rule(model)
        assert mirrored == {n for n, _ in model.named_parameters()}


def test_matrices_are_tensors_of_two_or_more_dimensions(gpt2, deit):
    for model in (gpt2, deit):
        _, mirrored = rule(model, mirror="matrices")
        assert mirrored == {n for n, p in model.named_parameters() if p.ndim >= 2}


def test_default_decay_is_the_papers_language_code(gpt2):
    decayed, _ = rule(gpt2)
    assert decayed == {n for n, p in gpt2.named_parameters() if ".h." in n and p.ndim == 2}


def test_decay_on_all_tensors_is_what_the_class_does(gpt2, deit):
    for model in (gpt2, deit):
        decayed, _ = rule(model, decay="all")
        assert decayed == {n for n, _ in model.named_parameters()}
    decayed, _ = rule(gpt2, decay="all", no_decay=["norm", "bias", "vector", "position"])
    assert decayed == {n for n, p in gpt2.named_parameters() if p.ndim == 2 and "wpe" not in n}


def test_blocks_and_all(gpt2, llama):
    _, mirrored = rule(gpt2, mirror="blocks")
    assert mirrored == {n for n, p in gpt2.named_parameters() if ".h." in n and p.ndim == 2}
    _, mirrored = rule(llama, mirror="all")
    assert mirrored == {n for n, _ in llama.named_parameters()}


def test_exclusions_by_kind_and_by_pattern(llama):
    decayed, mirrored = rule(llama, no_decay=["*.q_proj.*"], no_mirror=["embedding", "head"])
    assert "lm_head.weight" in decayed
    assert "model.embed_tokens.weight" not in decayed
    assert not any("q_proj" in n for n in decayed)
    assert "model.embed_tokens.weight" not in mirrored
    assert "lm_head.weight" not in mirrored
    assert "model.layers.0.self_attn.q_proj.weight" in mirrored


@pytest.mark.parametrize("mirror", ["matrices", "blocks", "all"])
def test_l1_is_for_the_matrices_that_pruning_prunes(gpt2, llama, deit, mirror):
    for model in (gpt2, llama, deit):
        groups = param_groups(model, weight_decay=0.1, alpha=5.0, mirror=mirror, l1=0.03)
        pruned = {layer.name for layer in find_layers(model, "blocks")}
        assert {r.name for r in groups.rows if r.l1} == pruned
        with pytest.warns(UserWarning, match="l1=9.0 has no effect"):
            optimizer = HORST(groups, l1=9.0)
        chosen = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, p in model.named_parameters():  # the others say 0, whatever the optimizer's own default
            assert chosen[id(p)]["l1"] == (0.03 if name in pruned else 0.0), name
        without = param_groups(model, weight_decay=0.1, alpha=5.0, mirror=mirror)
        for row, plain in zip(groups.rows, without.rows, strict=True):
            assert (row.name, row.decay, row.mirror) == (plain.name, plain.decay, plain.mirror)


def test_scales_inside_the_blocks_do_not_shrink():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)
            self.layer_scale = nn.Parameter(torch.full((4, 1, 1), 1e-6))  # as in ConvNeXt: l1 would end the branch

    groups = param_groups(nn.Sequential(Block(), Block()), l1=0.1, mirror="matrices")
    assert [(len(g["params"]), g["weight_decay"], g["alpha"], g["l1"]) for g in groups] == [
        (2, 1e-2, 5.0, 0.1),
        (2, 0.0, 5.0, 0.0),  # two or more dimensions: the mirror step
    ]


def test_without_l1_the_groups_do_not_mention_it(gpt2):
    for options in ({}, {"l1": 0.0}):
        groups = param_groups(gpt2, weight_decay=0.1, alpha=5.0, **options)
        assert all(set(group) == {"params", "weight_decay", "alpha", "beta"} for group in groups)
        assert "l1" not in groups.table()


def test_the_table_shows_l1_where_there_is_any(deit):
    groups = param_groups(deit, weight_decay=0.1, alpha=5.0, l1=0.03)
    lines = [line.split() for line in groups.table().splitlines()]
    assert lines[0] == ["kind", "decay", "mirror", "l1", "tensors", "parameters"]
    assert [line[:5] for line in lines if line[0] == "matrix"] == [
        ["matrix", "yes", "yes", "-", "1"],  # the patches' embedding
        ["matrix", "yes", "yes", "yes", "8"],
    ]
    every = groups.table(every_tensor=True).splitlines()
    assert every[0].split() == ["name", "kind", "decay", "mirror", "l1", "shape"]
    assert len(every) == 1 + len(list(deit.parameters()))


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    rows = param_groups(model, weight_decay=0.1, alpha=5.0).rows
    assert [r.name for r in rows] == ["0.bias", "1.weight", "1.bias"]


def test_a_compiled_model_gets_the_same_groups(deit):
    plain = param_groups(deit, weight_decay=0.1, alpha=5.0, mirror="blocks").rows
    compiled = param_groups(torch.compile(deit), weight_decay=0.1, alpha=5.0, mirror="blocks").rows
    assert compiled == plain


def test_the_table_counts_every_parameter(deit):
    groups = param_groups(deit, weight_decay=0.1, alpha=5.0)
    total = sum(int(line.split()[-1].replace(",", "")) for line in groups.table().splitlines()[1:])
    assert total == sum(p.numel() for p in deit.parameters())
    assert len(groups.table(every_tensor=True).splitlines()) == 1 + len(list(deit.parameters()))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mirror": "matrix"}, ValueError, "'matrices', 'blocks', 'all', got 'matrix'"),
        ({"mirror": "blocks"}, ValueError, "no repeated blocks"),
        ({"l1": 0.03}, ValueError, r"l1=0.03 found no repeated blocks in Linear.*Leave l1 out, and set group\['l1'\]"),
        ({"l1": 0.03, "mirror": "blocks"}, ValueError, r"mirror='blocks' found no.*Use mirror='matrices'.*Leave l1"),
        ({"l1": -0.1}, ValueError, "l1 must be a number of at least 0, got -0.1; use 0 to leave it out"),
        ({"decay": "none"}, ValueError, "decay must be one of 'matrices', 'all', got 'none'"),
        ({"no_decay": "embedding"}, TypeError, r"write \['embedding'\]"),
        ({"no_mirror": ["heads"]}, ValueError, "'heads', which is neither a kind"),
        ({"alpha": -1.0}, ValueError, "alpha"),
        ({"weight_decay": "0.1"}, TypeError, "weight_decay"),
    ],
)
def test_bad_input_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        param_groups(nn.Linear(3, 3), **{"weight_decay": 0.1, "alpha": 5.0, **options})


@pytest.mark.parametrize("give", [nn.Module.parameters, nn.Module.state_dict, lambda m: list(m.named_parameters())])
def test_parameters_in_place_of_the_model_are_refused(give):
    with pytest.raises(
        TypeError, match=r"takes the model itself.*got (generator|OrderedDict|list)\..*param_groups\(model"
    ):
        param_groups(give(nn.Linear(3, 3)), weight_decay=0.1, alpha=5.0)


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        param_groups(nn.Linear(3, 3).requires_grad_(False), weight_decay=0.1, alpha=5.0)


def test_experts_are_matrices(mixture):
    groups = param_groups(mixture, mirror="blocks", weight_decay=0.1, l1=0.01)
    rows = {row.name: row for row in groups.rows}
    for layer in find_layers(mixture):
        row = rows[layer.name]
        assert (row.kind, row.decay, row.mirror, row.l1) == ("matrix", True, True, True)
    stacks = [row for row in groups.rows if len(row.shape) == 3]
    assert len(stacks) == 4
    biases = [row for row in groups.rows if row.name.endswith("_bias")]
    assert len(biases) == (4 if type(mixture).__name__.startswith("GptOss") else 0)
    assert not any(row.decay or row.mirror or row.l1 for row in biases)
