"""Many sparsities of one model: the same models as prune makes, the dense one first, and left as it was."""

import copy

import pytest
import torch
from small_models import small_gpt2, spread, tokens

from horst.pruning import prune, sweep

METHODS = ["magnitude", "wanda", "sparsegpt"]
LEVELS = [0.3, 0.9, 0.5]


def snapshot(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("distribution", ["uniform", "global", "owl"])
@pytest.mark.parametrize("method", METHODS)
def test_each_level_is_the_model_that_prune_makes(method, distribution, sequential):
    model, batches, seen = spread(small_gpt2()), tokens(), []
    dense = snapshot(model)
    options = {"method": method, "data": batches, "distribution": distribution}

    def evaluate(model):
        seen.append(snapshot(model))
        return {"loss": float(len(seen))}

    rows = sweep(model, LEVELS, evaluate=evaluate, sequential=sequential, **options)
    assert equal(snapshot(model), dense)
    assert equal(seen[0], dense)
    for sparsity, found, row in zip(LEVELS, seen[1:], rows[1:], strict=True):
        expected = copy.deepcopy(model)
        report = prune(expected, sparsity, sequential=sequential, **options)
        assert equal(found, snapshot(expected))
        assert row == {
            "method": method,
            "sparsity": sparsity,
            "sparsity_of_pruned_layers": report.sparsity_of_pruned_layers,
            "sparsity_of_all_weights": report.sparsity_of_all_weights,
            "loss": row["loss"],
        }
    assert rows[0]["method"] == "dense"
    assert [row["loss"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert rows[0]["sparsity"] == rows[0]["sparsity_of_pruned_layers"] == rows[0]["sparsity_of_all_weights"] == 0.0


@pytest.mark.parametrize("sequential", [True, False])
def test_levels_that_empty_a_tensor_are_warned_of_once(sequential):
    model = spread(small_gpt2())
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight *= 1e-3
    with pytest.warns(UserWarning, match="at sparsity 0.3 removes") as found:
        sweep(model, LEVELS, evaluate=lambda model: {}, distribution="global", sequential=sequential)
    (warning,) = found
    assert warning.filename == __file__


def test_not_sequential_data_goes_through_the_model_once_for_all_levels():
    model, calls = spread(small_gpt2()), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    sweep(model, LEVELS, evaluate=lambda model: {}, method="sparsegpt", data=tokens(batches=3), sequential=False)
    assert len(calls) == 3 + 1  # and one sample, to see how the blocks are called


def test_levels_may_be_an_iterator():
    rows = sweep(spread(small_gpt2()), (level for level in LEVELS), evaluate=lambda model: {})
    assert [row["sparsity"] for row in rows] == [0.0, *LEVELS]


@pytest.mark.parametrize("fails_at", [0, 2])
def test_the_dense_weights_come_back_after_an_error(fails_at):
    model, count = spread(small_gpt2()), iter(range(10))
    dense = snapshot(model)

    def evaluate(model):
        if next(count) == fails_at:
            raise RuntimeError("no disk")
        return {}

    with pytest.raises(RuntimeError, match="no disk"):
        sweep(model, LEVELS, evaluate=evaluate)
    assert equal(snapshot(model), dense)


def test_bad_input_is_refused_before_the_first_evaluation():
    def evaluate(model):
        raise AssertionError("evaluated")

    for options, text in (
        ({"sparsities": [0.5, 50]}, "sparsity must lie in"),
        ({"sparsities": [0.5], "distribution": {"*": 0.5}}, "there is nothing to sweep"),
        ({"sparsities": [0.5], "method": "wanda"}, "needs calibration data"),
    ):
        with pytest.raises(ValueError, match=text):
            sweep(small_gpt2(), evaluate=evaluate, **options)
    for sparsities in (0.5, "0.5"):
        with pytest.raises(TypeError, match=r"must be a list of fractions, got '?0.5'?. For one level write \[0.5\]"):
            sweep(small_gpt2(), sparsities, evaluate=evaluate)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparsity'"):
        sweep(small_gpt2(), [0.5], evaluate=evaluate, sparsity=0.5)


@pytest.mark.parametrize("result", [0.5, {"sparsity": 0.1}])
def test_what_evaluate_returns_is_checked(result):
    with pytest.raises(TypeError, match="evaluate must return a mapping of named numbers"):
        sweep(small_gpt2(), [0.5], evaluate=lambda model: result)
