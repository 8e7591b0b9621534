"""All stages on small models of every kind: zeros are zeros, the sparsity is there, and the model recovers."""

import copy
import dataclasses
import math

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from recovery_runs import LOOP, MODELS, SHORT, Plain, gpt2, make, padded, score, weights, windows
from torch import nn

import horst
from horst.recovery import NotSparse, SparsifyConfig, check_sparse, distillation
from horst.recovery.data import read_examples
from horst.recovery.methods import METHODS, TrainMethod
from horst.recovery.teacher import RecoveryLoss
from horst.sparsity import Static, find_layers
from horst.sparsity.masks import NM, Block
from horst.sparsity.selection import exact_floor

OWN_MASKS = [("admm", "horst"), ("admm", "adamw"), ("ast", "horst"), ("cast", "adams")]


def zeros(model, **options):
    return {layer.name: layer.param.detach() == 0 for layer in find_layers(model, **options)}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_becomes_sparse(name):
    model, data = make(name)
    before = weights(model)
    report = horst.sparsify(model, data, sparsity=0.5, **SHORT)
    for mask in zeros(model).values():
        assert int(mask.sum()) == mask.numel() // 2
    assert report.sparsity == 0.5
    assert [layer.name for layer in report.layers.layers] == list(zeros(model))
    vectors = [name for name, value in before.items() if value.dim() == 1 and value.is_floating_point()]
    assert any(not torch.equal(before[name], weights(model)[name]) for name in vectors)  # all weights are trained
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert math.isfinite(report.stages[0].loss)


def lengths(rows):
    return torch.where(torch.arange(rows) % 3 > 0, 2, 8)[:, None]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("name", ["llama", "classifier"])
def test_accumulation_counts_every_prediction_once_though_rows_are_padded(name, labels):
    found = []
    for accumulate in (1, 2, 4):
        model, data = make(name)
        ids = data if name == "llama" else data["input_ids"]
        data = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths(len(ids))).long()}
        if labels:
            is_padding = data["attention_mask"] == 0
            data["labels"] = ids.masked_fill(is_padding, -100) if name == "llama" else torch.arange(len(ids)) % 3
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        loop = dataclasses.replace(LOOP, accumulate=accumulate)
        settings = {**SHORT, "method": "magnitude", "distill": "kl", "loop": loop}
        horst.sparsify(model, data, sparsity=0.5, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1), **settings)
        found.append(weights(model))
    for other in found[1:]:
        for key, value in found[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-6)


def test_hidden_states_count_where_there_are_no_labels():
    model, ids = make("llama")
    data = {"input_ids": ids[:4], "attention_mask": (torch.arange(8) < lengths(4)).long()}
    data["labels"] = ids[:4].masked_fill(torch.arange(4)[:, None] > 1, -100)
    config, teacher = SparsifyConfig(sparsity=0.5), copy.deepcopy(model).eval()
    teacher.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)
    examples = read_examples(data, model, batch_size=4, seed=0)
    loss = RecoveryLoss(model, teacher, examples, config, "squarehead")
    x, y = examples.source.take(torch.arange(4))
    first, second = (torch.stack((loss(model, *part), loss.count(*part))) for part in ((x[:2], y[:2]), (x[2:], y[2:])))
    assert first[1].tolist() == [8 + 2, 7 + 7]  # of unpadded tokens, and of labels
    assert second[1].tolist() == [2 + 8, 0]
    assert second[0, 0] > 0
    torch.testing.assert_close(loss(model, x, y)[1], first[0, 1])
    loss.close()


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_traced_by_the_compiler(name, monkeypatch):  # tests on a GPU compile it for good
    compile, compiled = torch.compile, []

    def by_tracing(part, **options):
        compiled.append(part)
        return compile(part, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", by_tracing)
    distillation._compiled.cache_clear()
    found = []
    for loop in (LOOP, dataclasses.replace(LOOP, compile="on")):
        model, data = make(name)
        if name == "plain":
            model.blocks.apply(lambda module: setattr(module, "p", 0.0))  # a compiled dropout draws other numbers
        horst.sparsify(model, data, sparsity=0.5, stages=(0.25,), **{**SHORT, "loop": loop})
        found.append(weights(model))
    distillation._compiled.cache_clear()
    for key, value in found[0].items():
        if not key.endswith("key.bias"):  # softmax does not see it: its gradient is rounding, which Adam makes a step
            torch.testing.assert_close(found[1][key], value, rtol=1e-3, atol=1e-4)
    blocks = [part for part in compiled if part is not distillation._some_rows]
    assert len(blocks) == 2 * 2 * 2  # two blocks of model and teacher, in two stages
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_n_of_m_holds_in_every_group(name, method):
    model, data = make(name)
    horst.sparsify(model, data, pattern="2:4", method=method, **SHORT)
    for layer in find_layers(model):
        groups = layer.inputs_last.reshape(-1, 4)
        assert (groups.count_nonzero(1) == 2).all()


def test_stages_are_pruned_and_trained_one_after_the_other():
    model, data = make("llama")
    report = horst.sparsify(model, data, sparsity=0.75, stages=(0.25, 0.5), evaluate=score, **{**SHORT, "steps": 40})
    assert [stage.sparsity for stage in report.stages] == [0.25, 0.5, 0.75]
    assert [stage.steps for stage in report.stages] == [10, 10, 20]
    assert report.units == 40 * 4 * 8
    assert [row["stage"] for row in report.rows()] == ["dense", *["pruned", "trained"] * 3]
    assert report.after["loss"] == pytest.approx(score(model)["loss"])
    assert report.after["loss"] < report.stages[0].pruned["loss"]
    assert all(int(mask.sum()) == mask.numel() * 3 // 4 for mask in zeros(model).values())
    assert report.to_dict()["before"] == report.dense


@pytest.mark.parametrize("train", ["fixed", "refresh", "admm"])
def test_one_threshold_divides_the_zeros_and_they_are_counted_together(train):
    model, data = make("llama")
    settings = {**SHORT, "steps": 30, "distribution": "global", "train": train}
    report = horst.sparsify(model, data, sparsity=0.7, stages=() if train == "admm" else (0.5,), **settings)
    masks = zeros(model)
    assert sum(int(mask.sum()) for mask in masks.values()) == exact_floor(0.7, sum(m.numel() for m in masks.values()))
    assert len({layer.kept / layer.weights for layer in report.layers.layers}) > 2  # not the same share in each


def test_the_first_and_the_last_block_can_be_left_dense():
    torch.manual_seed(0)
    model = Plain()
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    report = horst.sparsify(model, windows(), sparsity=0.5, layers="paper", **SHORT)
    assert [layer.name for layer in report.layers.layers] == ["blocks.1.1.weight"]
    assert [name for name, mask in zeros(model).items() if mask.any()] == ["blocks.1.1.weight"]


def test_blocks_are_removed_whole():
    model, data = make("plain")
    horst.sparsify(model, data, sparsity=0.5, pattern=(4, 4), method="wanda", **SHORT)
    for mask in zeros(model).values():
        units = mask.view(4, 4, 4, 4).transpose(1, 2).flatten(2)
        assert (units.all(2) | ~units.any(2)).all()
        assert int(units.all(2).sum()) == 8


@pytest.mark.parametrize("optimizer", ["horst", "adamw"])
def test_refreshed_masks_change_and_end_exact(optimizer):
    model, data = make("plain")
    settings = {**SHORT, "steps": 40, "lr": 0.02, "optimizer": optimizer}
    fixed = copy.deepcopy(model)
    horst.sparsify(fixed, data, sparsity=0.5, **settings)
    horst.sparsify(model, data, sparsity=0.5, train="refresh", refresh_every=10, **settings)
    mine, other = zeros(model), zeros(fixed)
    assert all(int(mask.sum()) == mask.numel() // 2 for mask in mine.values())
    assert any(not torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(("train", "optimizer"), OWN_MASKS)
@pytest.mark.parametrize("settings", [{"sparsity": 0.75}, {"pattern": "2:4"}], ids=["single", "2:4"])
def test_methods_with_masks_of_their_own_go_from_dense_to_sparse(train, optimizer, settings):
    model, data = make("llama")
    report = horst.sparsify(model, data, train=train, optimizer=optimizer, **settings, **{**SHORT, "steps": 16})
    assert len(report.stages) == 1
    assert report.layers.method == train  # it chose the masks, not config.method
    assert report.sparsity == settings.get("sparsity", 0.5)
    for layer in find_layers(model):
        if "pattern" in settings:
            assert (layer.inputs_last.reshape(-1, 4).count_nonzero(1) == 2).all()
        else:
            assert int((layer.param == 0).sum()) == layer.param.numel() * 3 // 4


def test_sam_changes_the_run_and_its_zeros_are_as_many():
    found = []
    for radius in (0.0, 0.1):
        model, data = make("plain")
        horst.sparsify(model, data, train="admm", sparsity=0.75, sam_radius=radius, **{**SHORT, "steps": 16})
        assert all(int(mask.sum()) == mask.numel() * 3 // 4 for mask in zeros(model).values())
        found.append(weights(model))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_any_optimizer_can_train():
    model, data = make("plain")
    made = []

    def sgd(model):
        made.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return made[-1]

    horst.sparsify(model, data, sparsity=0.5, optimizer=sgd, **SHORT)
    assert len(made) == 1
    assert made[0].state


def test_distillation_pulls_the_pruned_model_towards_the_dense_one():
    """With no labels at all, what the encoder returns comes closer to what it returned when it was dense."""
    model, data = make("bert")
    dense = copy.deepcopy(model)

    def distance(model):
        states = [m(**data).last_hidden_state for m in (model, dense)]
        counts = data["attention_mask"].bool()
        return {"distance": float((states[0] - states[1])[counts].square().mean())}

    report = horst.sparsify(model, data, sparsity=0.5, evaluate=distance, **{**SHORT, "steps": 60})
    assert report.dense["distance"] == 0
    assert report.after["distance"] < 0.5 * report.stages[0].pruned["distance"]


@pytest.mark.parametrize("name", ["plain", "vit"])
def test_hidden_states_of_plain_modules_are_those_of_their_blocks(name):
    model, data = make(name)
    report = horst.sparsify(model, data, sparsity=0.5, distill="squarehead", **SHORT)
    assert report.sparsity == 0.5
    assert not any(module._forward_hooks for module in model.modules())


def test_a_larger_teacher_of_the_same_vocabulary_may_teach_by_kl():
    model, data = make("plain")
    horst.sparsify(model, data, sparsity=0.5, teacher=Plain(width=24), **SHORT)
    with pytest.raises(ValueError, match=r"predicts 40 classes or tokens, the model 50: their vocabularies differ"):
        horst.sparsify(model, data % 40, sparsity=0.5, teacher=Plain(vocabulary=40), **SHORT)
    with pytest.raises(ValueError, match="SquareHead compares hidden states of equal shapes"):
        horst.sparsify(model, data, sparsity=0.5, teacher=Plain(width=24), distill="squarehead", **SHORT)


def test_the_teacher_stays_as_it_was():
    model, data = make("plain")
    teacher = copy.deepcopy(model)
    before = weights(teacher)
    horst.sparsify(model, data, sparsity=0.5, teacher=teacher, **SHORT)
    assert all(torch.equal(before[name], value) for name, value in weights(teacher).items())


@pytest.mark.parametrize("others", [False, True])
def test_a_teacher_that_would_learn_too_is_refused(others):
    model, data = make("gpt2")
    teacher = model
    if others:
        teacher = gpt2()
        teacher.transformer.wpe = model.transformer.wpe
    with pytest.raises(ValueError, match="the teacher shares weights with the model"):
        horst.sparsify(model, data, sparsity=0.5, teacher=teacher, **SHORT)
    assert all(p.requires_grad for p in model.parameters())


def test_adapters_of_peft_are_refused_and_merged_ones_are_welcome():
    model, data = make("gpt2")
    model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match=r"the model has PEFT adapters \(base_model.*c_attn\).*merge_and_unload"):
        horst.sparsify(model, data, sparsity=0.5, **SHORT)
    model = model.merge_and_unload().requires_grad_(True)
    assert horst.sparsify(model, data, sparsity=0.5, **SHORT).sparsity == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow_images", [False, True])
def test_narrow_models_of_images_learn_from_a_narrow_teacher(dtype, narrow_images):
    model, (images, labels) = make("vit")
    data = (images.to(dtype) if narrow_images else images, labels)
    report = horst.sparsify(model.to(dtype), data, sparsity=0.5, **SHORT)
    assert report.sparsity == 0.5
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_narrow_weights_are_trained_wide_and_given_back_narrow():
    model, data = make("gpt2")
    model = model.bfloat16()
    horst.sparsify(model, data, sparsity=0.5, **SHORT)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(int(mask.sum()) >= mask.numel() // 2 for mask in zeros(model).values())


def test_running_statistics_are_as_wide_as_the_weights_and_given_back_narrow():
    blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) for _ in range(2)))
    model = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)).bfloat16()
    _, data = make("vit")
    horst.sparsify(model, data, sparsity=0.5, method="magnitude", layers="all", **SHORT)
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.bfloat16}
    assert model[0][0][1].running_mean.any()


def test_frozen_weights_are_left_alone():
    model, data = make("plain")
    model.blocks[0].requires_grad_(False)
    before = weights(model.blocks[0])
    report = horst.sparsify(model, data, sparsity=0.5, **SHORT)
    assert [layer.name for layer in report.layers.layers] == ["blocks.1.1.weight"]
    assert all(torch.equal(before[name], value) for name, value in weights(model.blocks[0]).items())


def test_gradient_checkpointing_changes_nothing_but_memory():
    results = []
    for checkpointing in (False, True):
        model, data = make("llama")
        horst.sparsify(model, data, sparsity=0.5, gradient_checkpointing=checkpointing, **SHORT)
        results.append(weights(model))
        assert "forward" not in vars(model.model.layers[0])
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=0)


def test_the_generators_of_the_caller_are_left_alone():
    model, data = make("plain")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    horst.sparsify(model, data, sparsity=0.5, **SHORT)
    assert torch.equal(torch.rand(3), expected)


def test_how_long_to_train():
    model, data = make("plain")
    options = {key: value for key, value in SHORT.items() if key != "steps"}
    assert horst.sparsify(model, data, sparsity=0.5, **options).stages[0].steps == 24 / 4  # one pass
    assert horst.sparsify(model, data, sparsity=0.5, tokens=100, **options).stages[0].steps == 4  # of 32 tokens each
    vit, images = make("vit")
    with pytest.raises(ValueError, match="tokens=100 counts tokens of text, and the data has images"):
        horst.sparsify(vit, images, sparsity=0.5, tokens=100, **options)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sparsity": 0.5, "exclude": ["nowhere.*"]}, ValueError, r"exclude='nowhere\.\*' matches no parameter"),
        ({"pattern": "3:5"}, ValueError, "3:5 needs an input dimension that is a multiple of 5"),
        ({"sparsity": 0.5, "distil": "kl"}, TypeError, "distil"),
        ({"sparsity": 0.5, "distill": "none", "teacher": Plain()}, ValueError, "distill='none' uses no teacher"),
        ({"sparsity": 0.5, "train": "refresh", "steps": 2}, ValueError, "no room for a refresh"),
        ({"sparsity": 0.5, "layers": "blocks", "lora": 99}, ValueError, "lora=99 is more than the smaller side"),
        ({"sparsity": 0.5, "loop": dataclasses.replace(LOOP, accumulate=3)}, ValueError, "accumulate=3 must divide"),
    ],
)
def test_bad_settings_leave_the_model_as_it_was(settings, error, message):
    model, data = make("plain")
    before = weights(model)
    with pytest.raises(error, match=message):
        horst.sparsify(model, data, **{**SHORT, **settings})
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize("distill", ["kl", "none", "squarehead"])
def test_labels_that_the_model_does_not_predict_are_refused(distill):
    model, (images, labels) = make("vit")
    before = weights(model)
    with pytest.raises(ValueError, match="the data has labels up to 7, the model predicts 5 classes, from 0 to 4"):
        horst.sparsify(model, (images, labels + 3), sparsity=0.5, distill=distill, **SHORT)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_an_encoder_without_labels_needs_a_teacher():
    model, data = make("bert")
    with pytest.raises(ValueError, match="no labels and distill='none' uses no teacher: nothing to learn from"):
        horst.sparsify(model, data, sparsity=0.5, distill="none", **SHORT)
    with pytest.raises(TypeError, match="the model gives no logits"):
        horst.sparsify(model, {**padded(), "labels": torch.zeros(24, dtype=torch.int64)}, sparsity=0.5, **SHORT)


def test_what_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got 'folder'"):
        horst.sparsify("folder", windows(), sparsity=0.5)


def test_the_last_check_fails_loudly():
    model = nn.Linear(4, 4)
    layers = find_layers(model, "all")
    mask = {"weight": torch.ones(4, 4, dtype=torch.bool).tril()}
    with pytest.raises(NotSparse, match="weight has 6 masked weights that are not zero; weight has 0 zero units of"):
        check_sparse(layers, mask, Block(), 0.375)
    model.weight.data *= mask["weight"]
    assert check_sparse(layers, mask, Block(), 0.375)[0].kept == 10
    with pytest.raises(NotSparse, match="has 6 zero units of the 8 needed"):
        check_sparse(layers, mask, Block(), 0.5)
    with pytest.raises(NotSparse, match="the layers together have 6 zero units of the 8 needed"):
        check_sparse(layers, mask, Block(), 0.5, "global")
    with pytest.raises(NotSparse, match="has 2 groups of 4 with more than 2 weights"):
        check_sparse(layers, mask, NM(2, 4), 0.5)


def test_a_weight_that_comes_back_fails_the_run(monkeypatch):
    def forgetful(model, optimizer, masks, config, steps):
        sparsifier = Static(model, optimizer, masks=masks)
        sparsifier._zero_weights = lambda always=False: None
        for handle in sparsifier._handles:  # nor are gradients masked
            handle.remove()
        return sparsifier

    model, data = make("plain")
    monkeypatch.setitem(METHODS, "fixed", TrainMethod(forgetful))
    with pytest.raises(NotSparse, match=r"blocks\.0\.1\.weight has \d+ masked weights that are not zero"):
        horst.sparsify(model, data, sparsity=0.5, optimizer=lambda m: torch.optim.AdamW(m.parameters()), **SHORT)


def test_a_config_and_settings_go_together():
    model, data = make("plain")
    config = SparsifyConfig(sparsity=0.25, **{**SHORT, "steps": 2})
    assert horst.sparsify(model, data, config=config, sparsity=0.5).sparsity == 0.5


def test_the_cache_of_hugging_face_is_switched_on_again():
    model = gpt2()
    assert model.config.use_cache
    horst.sparsify(model, windows(), sparsity=0.5, **SHORT)
    assert model.config.use_cache


def test_on_a_cpu_the_default_is_float32():
    model, data = make("plain")
    report = horst.sparsify(model, data, sparsity=0.5, **{**SHORT, "loop": None})
    assert report.settings["loop"]["precision"] == "float32"


@pytest.mark.parametrize(("name", "longest"), [("gpt2", 16), ("llama", 32)])
def test_windows_longer_than_the_model_takes_are_refused(name, longest):
    model, _ = make(name)
    with pytest.raises(ValueError, match=f"rows of 40 tokens, and the model takes at most {longest}"):
        horst.sparsify(model, windows(length=40), sparsity=0.5, **SHORT)


def test_the_positions_that_roberta_keeps_for_padding_are_not_the_texts():
    config = transformers.RobertaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    model = transformers.RobertaModel(config)
    with pytest.raises(ValueError, match="rows of 33 tokens, and the model takes at most 32"):
        horst.sparsify(model, {"input_ids": torch.randint(2, 50, (8, 33))}, sparsity=0.5, **SHORT)
    model(torch.randint(2, 50, (8, 32)))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (3.5, "must return a dictionary of named numbers, got float"),
        (None, "got NoneType"),
        ({"loss": "low"}, "must return numbers by name, got {'loss': 'low'}"),
    ],
)
def test_an_evaluation_returns_named_numbers(found, message):
    model, data = make("plain")
    with pytest.raises(TypeError, match=message):
        horst.sparsify(model, data, sparsity=0.5, evaluate=lambda model: found, **SHORT)


def test_a_misspelt_setting_names_the_near_one():
    model, data = make("plain")
    with pytest.raises(TypeError, match=r"no setting 'sparcity'\. Did you mean sparsity\?"):
        horst.sparsify(model, data, sparcity=0.5)
    with pytest.raises(TypeError, match=r"no setting 'zzz'\. The settings are sparsity, pattern"):
        horst.sparsify(model, data, config=SparsifyConfig(sparsity=0.5), zzz=1)


def test_a_model_with_more_zeros_than_asked_for_says_so(caplog):
    model, data = make("plain")
    horst.sparsify(model, data, sparsity=0.75, stages=(), **SHORT)
    assert "zero already" not in caplog.text
    report = horst.sparsify(model, data, sparsity=0.5, **SHORT)
    assert report.sparsity == 0.75
    assert "75 % of the weights to prune are zero already, more than the 50 % asked for" in caplog.text
