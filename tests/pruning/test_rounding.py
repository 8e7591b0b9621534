"""Pruning and rounding at once: SparseGPT against exact least squares, and a grid that a file can hold."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from horst.parameters.quantization import Grid, choose_scales, dequantize, quantize
from horst.pruning import SparseGPT, compensate, prune, sweep
from horst.sparsity.masks import NM, Block


def inputs(rows, columns, seed=0):
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=g) / columns**0.5 + torch.eye(columns)
    return torch.randn(rows, columns, generator=g) @ mixing * (torch.rand(columns, generator=g) * 2 + 0.1)


def matrix(rows, columns, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def damped_hessian(X):
    H = 2 / len(X) * X.double().t() @ X.double()
    return H + 0.01 * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)


def by_definition(W, H, grid, mask_of, unit):
    """Column after column: remove or round it, then solve the columns to the right anew, in float64.

    Minimise (v - w) H (v - w) over the entries to the right of j, those up to j being given. ``mask_of`` says which
    weights of the next ``unit`` columns go, given the matrix as it is when the first of them is reached.
    """
    V, columns = W.clone(), W.shape[1]
    going = torch.zeros(W.shape, dtype=torch.bool)
    scales = torch.zeros(len(W), dtype=W.dtype)
    for j in range(columns):
        if j % unit == 0:
            going[:, j : j + unit] = mask_of(V, j, min(j + unit, columns)) | (W == 0)[:, j : j + unit]
        if j % grid.group_size == 0:
            own = slice(j, min(j + grid.group_size, columns))
            preview = torch.cat([mask_of(V, k, k + unit) for k in range(j, own.stop, unit)], 1) | (W == 0)[:, own]
            kept = V[:, own].masked_fill(preview, 0.0)
            scales = choose_scales(kept.float(), grid, torch.float32).double()
        for i in range(len(W)):
            code = max(-grid.largest, min(grid.largest, round(float(V[i, j] / scales[i]))))
            V[i, j] = 0.0 if going[i, j] else code * scales[i]
        left, right = slice(0, j + 1), slice(j + 1, None)
        V[:, right] = W[:, right] - (V - W)[:, left] @ H[left, right] @ torch.linalg.inv(H[right, right])
    return V


def scores(V, H, start, end):
    """The rise of the error if one entry went alone."""
    return torch.stack([V[:, j].square() / torch.linalg.inv(H[j:, j:])[0, 0] for j in range(start, end)], dim=1)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("count", [0, 71])
def test_removing_and_rounding_is_exact_constrained_least_squares(bits, count):
    rows, columns, grid = 6, 24, Grid(bits, group_size=8)
    W, H = matrix(rows, columns).double(), damped_hessian(inputs(200, columns))
    W[3, 5] = W[1, 20] = 0.0
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)

    def mask_of(V, start, end):
        mask = torch.zeros(rows, end - start, dtype=torch.bool)
        number = count * end // columns - count * start // columns
        mask.view(-1)[scores(V, H, start, end).flatten().argsort()[:number]] = True
        return mask

    expected = by_definition(W, H, grid, mask_of, 8)
    found, loss = compensate(W, U, torch.zeros(columns, dtype=torch.bool), count=count, block=8, grid=grid)
    assert_close(found, expected)
    assert (found[W == 0] == 0).all()
    assert int((found == 0).sum()) >= count
    change = found - W
    assert loss == pytest.approx(float((change @ H * change).sum()))


def test_two_of_four_and_rounding_is_exact_constrained_least_squares():
    W, H, grid = matrix(6, 16).double(), damped_hessian(inputs(200, 16)), Grid(4, group_size=8)
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)

    def mask_of(V, start, end):
        found = scores(V, H, start, end)
        return torch.zeros_like(found, dtype=torch.bool).scatter(1, found.argsort(1)[:, :2], True)

    expected = by_definition(W, H, grid, mask_of, 4)
    found, _ = compensate(W, U, torch.zeros(16, dtype=torch.bool), pattern=NM(2, 4), block=8, grid=grid)
    assert_close(found, expected)


def model_of(kind=nn.Linear, dtype=torch.float32):
    torch.manual_seed(3)
    blocks = [nn.Sequential(kind(48, 40), nn.ReLU(), kind(40, 48)) for _ in range(2)]
    return nn.Sequential(*blocks).to(dtype)


def conv1d(inputs, outputs):
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("values", ["int8", "int4", "int2"])
@pytest.mark.parametrize(("kind", "dtype"), [(nn.Linear, torch.float32), (conv1d, torch.bfloat16)])
def test_the_weights_lie_on_a_grid_that_rounding_again_does_not_change(method, values, kind, dtype):
    model = model_of(kind, dtype)
    data = [torch.randn(300, 48).to(dtype)]
    report = prune(model, 0.5, method=method, data=data, values=values, group_size=32)
    assert report.sparsity_of_pruned_layers >= 0.5
    for block in model:
        for layer in (block[0], block[2]):
            W = layer.weight.detach() if kind is nn.Linear else layer.weight.detach().t()
            codes, scales = quantize(W, int(values[3:]), 32)
            assert torch.equal(dequantize(codes, scales, 32, dtype), W)


def output_error(model, dense, X):
    with torch.no_grad():
        return float((model(X) - dense(X)).square().sum())


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_rounding_while_pruning_beats_rounding_afterwards(sparsity):
    X, dense = inputs(600, 48), model_of()
    errors = []
    for values_while_pruning in (True, False):
        model = model_of()
        values = {"values": "int3", "group_size": 16}
        if values_while_pruning:
            prune(model, sparsity, method="sparsegpt", data=[X], **values)
        else:
            prune(model, sparsity, method="sparsegpt", data=[X])
            prune(model, 0.0, **values)
        errors.append(output_error(model, dense, X))
    assert errors[0] < errors[1]


def test_sparsity_zero_rounds_a_sparse_model_and_keeps_its_zeros():
    model = model_of()
    prune(model, 0.6)
    zeros = {name: p == 0 for name, p in model.named_parameters() if p.dim() == 2}
    prune(model, 0.0, method="sparsegpt", data=[inputs(300, 48)], values="int8")
    for name, p in model.named_parameters():
        if name in zeros:
            assert (p[zeros[name]] == 0).all()
            assert (p != 0).sum() > 0.9 * (~zeros[name]).sum()


def test_bfloat16_values_are_bfloat16_numbers_in_the_models_dtype():
    model = model_of()
    prune(model, 0.5, values="bfloat16")
    weight = model[0][0].weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, weight.bfloat16().float())


def test_convolutions_are_rounded_in_the_groups_of_their_file():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    prune(model, 0.5, layers="all", values="int4", group_size=9)
    W = model[0].weight.detach().flatten(1)
    assert torch.equal(dequantize(*quantize(W, 4, 9), 9), W)


def test_a_sweep_takes_values():
    rows = sweep(
        model_of(), [0.0, 0.5], evaluate=lambda m: {"distinct": len(m[0][0].weight[0].unique())}, values="int2"
    )
    assert [row["distinct"] <= 3 for row in rows] == [False, True, True]


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match=r"values must be one of float32, .*, got 'int5'"):
        prune(model_of(), 0.5, values="int5")
    with pytest.raises(ValueError, match="group_size must be a multiple of 4 for 2:4, got 30"):
        prune(model_of(), pattern="2:4", values="int4", group_size=30)
    with pytest.raises(ValueError, match="group_size must be at least 1"):
        prune(model_of(), 0.5, values="int4", group_size=0)


def test_columns_whose_input_is_always_zero_stay_gone():
    W, X, method = matrix(6, 12), inputs(100, 12), SparseGPT(grid=Grid(4, 4))
    X[:, [2, 7]] = 0.0
    hessian = method.statistic(12)
    hessian.add(X)
    method.prune(W, method.prepare(W, hessian, "fc.weight"), Block(), count=36)
    assert (W[:, [2, 7]] == 0).all()
    assert W.isfinite().all()
