"""The public entry: exact counts, layers, patterns, distributions, the report, and the errors."""

import copy
import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import ARCHITECTURES, hf_gpt2, small_gpt2, spread, tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from horst.pruning import OWL, InputNorms, Magnitude, Method, SparseGPT, Wanda, prune
from horst.sparsity import find_layers, magnitude_mask, owl_ratios
from horst.sparsity.selection import exact_floor

METHODS = ["magnitude", "wanda", "sparsegpt"]


def zeros(model, name):
    return int((model.get_parameter(name) == 0).sum())


def dense_and(model):
    return copy.deepcopy(model), model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_loses_exactly_its_share(name, method):
    model, batches = ARCHITECTURES[name]()
    spread(model)
    others = {key: p.clone() for key, p in model.named_parameters()}
    report = prune(model, 0.29, method=method, data=batches)
    assert len(report.layers) == len(find_layers(model))
    for layer in report.layers:
        assert zeros(model, layer.name) == layer.weights - layer.kept == exact_floor(0.29, layer.weights)
        del others[layer.name]
    assert all(torch.equal(model.get_parameter(key), p) for key, p in others.items())


@settings(max_examples=20)
@given(sparsity=st.floats(0, 0.999), method=st.sampled_from(METHODS))
def test_counts_are_exact_at_any_sparsity(sparsity, method):
    model = spread(small_gpt2(width=6, layers=2, heads=1))
    report = prune(model, sparsity, method=method, data=tokens(batches=1))
    assert [layer.weights - layer.kept for layer in report.layers] == [
        exact_floor(sparsity, layer.weights) for layer in report.layers
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [hf_gpt2, lambda: (small_gpt2(), tokens())])
def test_two_of_four_along_the_inputs(build, method):
    model, batches = build()
    spread(model)
    prune(model, pattern="2:4", method=method, data=batches)
    for layer in find_layers(model):
        W = layer.param if layer.input_dim == 1 else layer.param.t()
        assert ((W != 0).reshape(len(W), -1, 4).sum(-1) == 2).all()


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_blocks_of_an_out_by_in_matrix(method):
    model, batches = hf_gpt2()
    spread(model)
    prune(model, 0.5, pattern=(4, 8), method=method, data=batches)
    for layer in find_layers(model):  # Conv1D is stored in x out
        kept = (layer.param.t() != 0).reshape(layer.param.shape[1] // 4, 4, -1, 8).sum(dim=(1, 3))
        assert set(kept.unique().tolist()) == {0, 32}
        assert int((kept == 0).sum()) == kept.numel() // 2


# The paper's rule


def test_the_papers_rule_prunes_its_weights_of_gpt2_small():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.attn\.c_attn\.weight is not whole in memory"):
        prune(model, 0.5, layers="paper")
    pruned = [layer for layer in find_layers(model) if layer.name.split(".")[2] not in ("0", "11")]
    assert sum(layer.param.numel() for layer in pruned) == 70_778_880


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("build", [hf_gpt2, lambda: (small_gpt2(layers=5), None)])
def test_the_papers_rule_by_the_definition(build, sparsity):
    """Per tensor the floor(s * n) smallest, blocks 1 to L - 2 alone, nothing else touched."""
    dense, model = dense_and(spread(build()[0]))
    last = len(model.transformer.h) - 1
    report = prune(model, sparsity, layers="paper")
    assert len(report.layers) == 4 * (last - 1)
    for name, p in dense.named_parameters():
        number = int(name.split(".")[2]) if ".h." in name else -1
        expected = p.detach().clone()
        if p.dim() == 2 and 0 < number < last:
            expected.view(-1)[p.abs().flatten().argsort()[: math.floor(sparsity * p.numel() + 1e-9)]] = 0.0
        assert torch.equal(model.get_parameter(name), expected), name


def test_the_paper_in_a_model_of_two_blocks_is_refused():
    with pytest.raises(ValueError, match=r"layers='paper' prunes the blocks between .* transformer\.h\. has 2"):
        prune(small_gpt2(layers=2), 0.5, layers="paper")
    with pytest.raises(ValueError, match="layers='paper' needs a model with repeated blocks"):
        prune(nn.Linear(4, 4), 0.5, layers="paper")


# Which layers


def test_frozen_weights_are_pruned():
    model = small_gpt2().requires_grad_(False)
    assert prune(model, 0.5).sparsity_of_pruned_layers == 0.5


def test_include_and_exclude():
    model = spread(small_gpt2())
    report = prune(model, 0.5, include=["transformer.wpe.weight"], exclude=["*.mlp.*"])
    assert {layer.name.split(".")[-2] for layer in report.layers} == {"wpe", "c_attn", "c_proj"}
    assert not any(".mlp." in layer.name for layer in report.layers)


def test_convolutions_are_pruned_by_magnitude():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3))
    dense = copy.deepcopy(model)
    prune(model, 0.5, layers="all")
    for p, d in ((model[0].weight, dense[0].weight), (model[2].weight, dense[2].weight)):
        assert torch.equal(p != 0, magnitude_mask(d, 0.5))
    prune(dense, pattern="2:4", layers=None, include=["0.weight"])
    assert ((dense[0].weight != 0).sum(1) == 2).all()  # of the four input channels


@pytest.mark.parametrize("values", [None, "int8"])
@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv1d(8, 8, 1), nn.Conv2d(1, 8, 3), nn.Conv2d(8, 1, 3)],
    ids=str,
)
def test_convolutions_whose_matrix_is_a_view_of_the_weight_are_pruned(layer, values):
    model = nn.Sequential(copy.deepcopy(layer))
    prune(model, 0.5, layers="all", values=values)
    assert torch.equal(model[0].weight != 0, magnitude_mask(layer.weight, 0.5))
    if values is None:
        assert torch.equal(model[0].weight, layer.weight * (model[0].weight != 0))


# Distributions


@pytest.mark.parametrize("method", METHODS)
def test_global_meets_the_total_exactly_and_differs_by_layer(method):
    model = spread(small_gpt2())
    report = prune(model, 0.5, method=method, data=tokens(), distribution="global")
    assert report.zeros == exact_floor(0.5, sum(layer.weights for layer in report.layers))
    assert len({layer.sparsity for layer in report.layers}) > 1


def test_global_magnitude_is_one_threshold():
    dense, model = dense_and(spread(small_gpt2()))
    report = prune(model, 0.7, distribution="global")
    removed, kept = [], []
    for layer in report.layers:
        w, d = model.get_parameter(layer.name), dense.get_parameter(layer.name)
        removed.append(d[w == 0].abs())
        kept.append(d[w != 0].abs())
    assert torch.cat(removed).max() <= torch.cat(kept).min()


@pytest.mark.parametrize("sequential", [True, False])
def test_global_sparsegpt_takes_as_many_from_each_layer_as_one_threshold_on_magnitudes(sequential):
    dense, model = dense_and(spread(small_gpt2()))
    counted = prune(dense, 0.7, distribution="global")
    report = prune(model, 0.7, method="sparsegpt", data=tokens(), distribution="global", sequential=sequential)
    assert [layer.kept for layer in report.layers] == [layer.kept for layer in counted.layers]


def test_global_wanda_is_one_threshold_over_its_scores():
    """With the dense model's inputs (not sequential) the definition is easy to write down."""
    dense, model = dense_and(spread(small_gpt2(layers=2)))
    batches, norms = tokens(), {}
    for name, module in dense.named_modules():
        if isinstance(module, nn.Linear) and ".h." in name:
            module.register_forward_pre_hook(lambda m, args, name=name: norms.setdefault(name, []).append(args[0]))
    with torch.no_grad():
        for batch in batches:
            dense(batch)
    report = prune(model, 0.6, method="wanda", data=batches, distribution="global", sequential=False)
    removed, kept = [], []
    for layer in report.layers:
        x = torch.cat(norms[layer.name.removesuffix(".weight")]).flatten(0, 1)
        scores = dense.get_parameter(layer.name).abs() * x.square().mean(0).sqrt()
        removed.append(scores[model.get_parameter(layer.name) == 0])
        kept.append(scores[model.get_parameter(layer.name) != 0])
    assert torch.cat(removed).max() <= torch.cat(kept).min() * (1 + 1e-5)


def two_scales(scale=1e-3):
    """Two blocks of two linear layers, the second with smaller weights."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2)])
    with torch.no_grad():
        for block in model:
            block[2].weight *= scale
    return model


@pytest.mark.parametrize(("method", "pattern"), [*((m, None) for m in METHODS), ("magnitude", (2, 2))])
def test_one_threshold_that_empties_tensors_warns_once_at_the_callers_line(method, pattern):
    options = {"method": method, "data": [torch.randn(32, 16)], "pattern": pattern}
    with pytest.warns(UserWarning, match="removes at least") as found:
        report = prune(two_scales(), 0.6, distribution="global", **options)
    assert [layer.sparsity for layer in report.layers][1::2] == [1.0, 1.0]
    (warning,) = found
    text = str(warning.message)
    assert "distribution='global' at sparsity 0.6 removes at least 99 % of 2 of 4 tensors" in text
    assert f"worst is 0.2.weight, which loses {'64 of 64 blocks' if pattern else '256 of 256 weights'}." in text
    assert "report.summary()" in text
    assert "distribution='uniform', the default. One threshold suits models trained with l1." in text
    assert warning.filename == __file__


def test_a_default_encoder_layer_of_torch_is_warned_of():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 128), 2, enable_nested_tensor=False)
    with pytest.warns(UserWarning, match=r"99 % of 2 of 8 tensors; worst is layers\.0\.linear2\.weight"):
        prune(model, 0.7, distribution="global")


def test_tensors_are_emptied_in_silence_where_that_is_what_was_asked_for():  # warnings are errors here
    prune(two_scales(), 0.95, distribution="global")
    prune(two_scales(), 0.5)
    prune(two_scales(0.0), 0.5, distribution="global")  # zero already, as l1 leaves some tensors
    prune(two_scales(), distribution={"*.0": 0.0, "*.2": 0.999})


def test_owl_that_empties_a_block_warns_without_a_word_of_thresholds():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16)) for _ in range(2)])
    with torch.no_grad():
        model[0][0].weight[0, 0] = 100.0  # the only outlier
    with pytest.warns(UserWarning, match="removes at least 99 % of 1 of 2 tensors; worst is 1.0.weight") as found:
        prune(model, 0.85, distribution=OWL(spread=0.145))
    assert "threshold suits" not in str(found[0].message)


@pytest.mark.parametrize("method", METHODS)
def test_owl_gives_each_block_its_ratio(method):
    model = small_gpt2()
    with torch.no_grad():
        for layer in find_layers(model):
            layer.param.uniform_(0.02, 0.03)
        model.transformer.h[1].mlp.c_fc.weight[0, :4] = 0.3  # the only outliers
    owl = OWL(threshold=4.0, spread=0.1)
    report = prune(model, 0.5, method=method, data=tokens(), distribution=owl, layers="all_linear")
    for layer in report.layers:
        # Three blocks at s + mean, one 0.2 below; the tied head lies in no block.
        expected = 0.5 if ".h." not in layer.name else 0.35 if ".h.1." in layer.name else 0.55
        assert layer.weights - layer.kept == exact_floor(expected, layer.weights), layer.name


def test_owl_without_data_is_owl_of_the_magnitudes():
    dense, model = dense_and(spread(small_gpt2(layers=3)))
    prune(model, 0.7, distribution="owl")
    scores = {
        f"transformer.h.{k}": [p.detach().abs() for p in block.parameters() if p.dim() == 2]
        for k, block in enumerate(dense.transformer.h)
    }
    expected = copy.deepcopy(dense)
    prune(expected, distribution=owl_ratios(scores, 0.7))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_owl_refuses_inputs_that_are_not_finite(bad):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with pytest.raises(ValueError, match=r"the calibration inputs of 0\.0\.weight hold NaN or infinity"):
        prune(model, 0.5, distribution="owl", data=[torch.full((3, 4), bad)])
    assert all(bool((p != 0).any()) for p in model.parameters())


def test_a_mapping_gives_each_layer_its_own():
    model = spread(small_gpt2())
    report = prune(
        model, distribution={"transformer.h.0": 0.25, "*.mlp.*": 0.5, "*": 0.75}, method="wanda", data=tokens()
    )
    for layer in report.layers:
        expected = 0.25 if ".h.0." in layer.name else 0.5 if ".mlp." in layer.name else 0.75
        assert layer.sparsity == expected


def test_wanda_compares_in_rows_unless_the_threshold_is_global():
    for options, is_even in (({}, True), ({"distribution": "global"}, False), ({"method": Wanda("tensor")}, False)):
        model = spread(small_gpt2())
        prune(model, 0.5, **{"method": "wanda", "data": tokens(), **options})
        rows = {int(n) for n in (model.transformer.h[0].mlp.c_fc.weight == 0).sum(1)}
        assert (rows == {8}) is is_even


def test_methods_take_options():
    a, b = dense_and(spread(small_gpt2()))
    prune(a, 0.5, method=SparseGPT(damping=1.0), data=(data := tokens()))
    prune(b, 0.5, method="sparsegpt", data=data)
    assert not torch.equal(a.transformer.h[0].mlp.c_fc.weight, b.transformer.h[0].mlp.c_fc.weight)
    a = small_gpt2()
    prune(a, 0.5, method=Magnitude(compare="row"))
    assert {int(n) for n in (a.transformer.h[0].mlp.c_fc.weight == 0).sum(1)} == {8}


class Largest(Method):
    """A method from outside: removes the largest input times weight, and says how many it removed."""

    name = "largest"
    statistic = InputNorms

    def prepare(self, W, statistic, name):
        return {"norms": statistic.norms()}

    def prune(self, W, prepared, pattern, count):
        order = (W.abs() * prepared["norms"]).flatten().argsort(descending=True)
        W.view(-1)[order[:count]] = 0.0
        return float(count)


def test_a_method_from_outside():
    report = prune(small_gpt2(), 0.25, method=Largest(), data=tokens(), distribution="erk")
    assert report.method == "largest"
    assert all(layer.error == layer.weights - layer.kept for layer in report.layers)
    assert report.zeros == exact_floor(0.25, sum(layer.weights for layer in report.layers))


def test_the_stored_order_of_a_matrix_does_not_matter():
    """The same weights in Hugging Face's Conv1D (in x out) and in nn.Linear (out x in), ties included."""
    conv, batches = hf_gpt2()
    with torch.no_grad():
        for layer in find_layers(conv):
            layer.param.copy_((layer.param * 50).round() / 50)  # many ties
    linear = copy.deepcopy(conv)
    for block in linear.transformer.h:
        for parent in (block.attn, block.mlp):
            for name in ("c_attn", "c_proj", "c_fc"):
                if hasattr(parent, name):
                    old = getattr(parent, name)
                    new = nn.Linear(*old.weight.shape)
                    new.weight, new.bias = nn.Parameter(old.weight.detach().t().contiguous()), old.bias
                    setattr(parent, name, new)
    for method in METHODS:
        prune(conv, 0.5, method=method, data=batches)
        prune(linear, 0.5, method=method, data=batches)
        for a, b in zip(find_layers(conv), find_layers(linear), strict=True):
            assert torch.equal(a.param.t() == 0, b.param == 0), (method, a.name)


# Data


def test_data_may_be_a_generator_and_is_read_up_to_the_number_of_samples():
    model, read = spread(small_gpt2()), []

    def batches():
        for batch in tokens(batches=10, size=4):
            read.append(len(batch))
            yield batch

    prune(model, 0.5, method="wanda", data=batches(), samples=10, distribution="owl")
    assert read == [4, 4, 4]


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"input_ids": x}])
def test_batches_of_every_form_are_the_same(form):
    model, batches = hf_gpt2()
    expected = copy.deepcopy(spread(model))
    prune(model, 0.5, method="sparsegpt", data=[form(batch) for batch in batches])
    prune(expected, 0.5, method="sparsegpt", data=batches)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_data_without_a_method_that_reads_them_are_refused():
    with pytest.raises(ValueError, match=r"data is given and method is not.* Give method='sparsegpt', or leave data"):
        prune(small_gpt2(), 0.5, data=tokens())
    with pytest.raises(ValueError, match=r"data is given and method is not.* Give method='wanda', or leave data"):
        prune(small_gpt2(), 0.5, data=tokens(), pattern=(2, 2))  # sparsegpt removes no blocks
    prune(small_gpt2(), 0.5, data=tokens(), distribution="owl")  # which reads them
    prune(small_gpt2(), 0.5, data=tokens(), method="magnitude")  # asked for, as in a loop over methods


def test_rows_of_a_dataset_that_are_no_batches_are_explained():
    model, _ = hf_gpt2()
    rows = [{"input_ids": torch.arange(6)} for _ in range(4)]
    message = r"a batch's input_ids has one dimension, shape \(6,\).* Put the rows in a DataLoader, or stack them"
    with pytest.raises(ValueError, match=message):
        prune(model, 0.5, method="sparsegpt", data=rows)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_no_usual_floats_are_refused_by_name(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    with pytest.raises(
        TypeError, match=rf"1\.weight must be one of torch.float16, .* got {dtype}. Load the model with"
    ):
        prune(model, 0.5, layers="all_linear")
    prune(model, 0.5, layers="all_linear", exclude=["1.*"])
    assert int((model[0].weight == 0).sum()) == 8


# The report


def test_the_report_adds_up():
    model, batches = hf_gpt2()
    spread(model)
    report = prune(model, 0.5, method="sparsegpt", data=batches)
    everything = sum(p.numel() for p in model.parameters())
    assert report.zeros == sum(zeros(model, layer.name) for layer in report.layers)
    assert report.sparsity_of_pruned_layers == 0.5
    assert report.sparsity_of_all_weights == report.zeros / everything
    assert all(0 < layer.error < 1 for layer in report.layers)
    assert report.rows()[0].keys() == {"layer", "shape", "weights", "kept", "sparsity", "error"}
    lines = report.summary().splitlines()
    assert lines[0].split() == ["layer", "shape", "weights", "zeros", "share", "error"]
    assert lines[1].split()[:5] == ["transformer.h.0.attn.c_attn.weight", "16x48", "768", "384", "50.0%"]
    assert float(lines[1].split()[5]) == pytest.approx(report.layers[0].error, rel=1e-3)
    assert lines[-2].split()[:2] == ["whole", "model"]
    assert lines[-1].startswith("error: share of the energy")


def test_methods_that_do_not_know_the_error_say_none():
    report = prune(spread(small_gpt2()), 0.5)
    assert {layer.error for layer in report.layers} == {None}
    assert "error" not in report.summary()


def test_zeros_that_were_there_count():
    model = spread(small_gpt2())
    prune(model, 0.8)
    assert prune(model, 0.3).sparsity_of_pruned_layers == pytest.approx(0.8, abs=1e-3)


# Errors

BAD = [
    ({"sparsity": 50}, ValueError, r"sparsity must lie in \[0, 1\), got 50"),
    ({"sparsity": math.nan}, ValueError, r"sparsity must lie in \[0, 1\)"),
    ({"sparsity": None}, ValueError, "sparsity is needed unless the pattern is N:M"),
    ({"method": "obs"}, ValueError, "method must be one of magnitude, wanda, sparsegpt, .* got 'obs'"),
    ({"method": "wanda"}, ValueError, "method='wanda' needs calibration data"),
    ({"distribution": "even"}, ValueError, "distribution must be 'uniform', .*'owl'.* got 'even'"),
    ({"distribution": {"*": 0.5}}, ValueError, "mapping in distribution fixes .* sparsity=0.5 has no meaning"),
    ({"distribution": {"wte": 0.5}, "sparsity": None}, ValueError, "no entry of the sparsity dictionary fits"),
    ({"pattern": "2:4", "distribution": "owl"}, ValueError, "2:4 fixes the sparsity of every layer"),
    ({"pattern": "2:4", "sparsity": 0.6}, ValueError, "2:4 fixes the sparsity at 0.5, got sparsity=0.6"),
    ({"pattern": "3:7"}, ValueError, "needs an input dimension that is a multiple of 7"),
    ({"pattern": (5, 5)}, ValueError, "blocks of 5 x 5 do not tile"),
    ({"pattern": "2/4"}, ValueError, "pattern must be None for single weights, 'N:M'"),
    ({"pattern": (4, 4), "method": "sparsegpt", "data": [1]}, ValueError, "sparsegpt prunes single weights or N:M"),
    ({"sparsity": "50%"}, TypeError, r"sparsity must be a number in \[0, 1\), got '50%'. Give a fraction: 0.5"),
    ({"layers": "block"}, ValueError, "layers must be 'blocks', 'all_linear', 'all', 'paper' or None, got 'block'"),
    ({"data": torch.ones(2, 8)}, TypeError, r"data must be an iterable of batches, got one Tensor: write \[batch\]"),
    ({"data": {"input_ids": 1}}, TypeError, "got one dict"),
    ({"data": ["text"]}, TypeError, "a batch is a tensor, a tuple or list .* got str without one"),
    ({"data": [1, 2]}, TypeError, "a batch is a tensor, a tuple or list .* got int without one"),
    ({"data": []}, ValueError, "data holds no batch"),
    ({"data": tokens(), "samples": 0}, ValueError, "samples must be at least 1, or None to read all data, got 0"),
    ({"layers": "paper", "exclude": "*.attn.*"}, TypeError, "include and exclude are lists of patterns"),
    ({"distribution": "owl", "layers": None, "include": ["lm_head.*"]}, ValueError, "no parameter"),
    ({"distribution": "owl", "layers": None, "include": ["*.wpe.*"]}, ValueError, "no layer lies in a block"),
    ({"distribution": "owl", "sparsity": 0.99}, ValueError, "Use a smaller spread"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
def test_bad_input_is_refused_before_anything_is_changed(options, error, text):
    dense, model = dense_and(spread(small_gpt2()))
    with torch.no_grad():
        for each in (dense, model):
            each.transformer.h[0].mlp.c_fc.weight[0, :3] = 9.0
    options = {"sparsity": 0.5, **options}
    with pytest.raises(error, match=text):
        prune(model, options.pop("sparsity"), **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))


@pytest.mark.parametrize("layers", ["blocks", "paper"])
def test_a_directory_is_not_a_model(layers):
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got './dir'. Load a saved model first: horst.ex"):
        prune("./dir", 0.5, layers=layers)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got OrderedDict"):
        prune(small_gpt2().state_dict(), 0.5, layers=layers)


def test_deit_small_prunes_the_papers_weights():
    model = timm.create_model("deit_small_patch16_224")
    report = prune(model, 0.9)
    assert sum(layer.weights for layer in report.layers) == 21_233_664
    assert report.zeros == sum(exact_floor(0.9, layer.weights) for layer in report.layers)
