"""The maths on plain matrices: exact counts, Wanda against a loop, SparseGPT against constrained least squares."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from horst.pruning import (
    Hessian,
    InputNorms,
    Magnitude,
    SparseGPT,
    Wanda,
    compensate,
    inverse_factor,
    mask_by_score,
    wanda_scores,
)  # fmt: skip
from horst.pruning.sparsegpt import full_float32
from horst.sparsity.masks import NM, Block

NONE = torch.tensor([])


def inputs(rows, columns, seed=0):
    """Correlated inputs with columns of unlike size."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=g) / columns**0.5 + torch.eye(columns)
    return torch.randn(rows, columns, generator=g) @ mixing * (torch.rand(columns, generator=g) * 2 + 0.1)


def matrix(rows, columns, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def statistic(kind, X, pieces=3):
    found = kind(X.shape[1])
    for part in X.chunk(pieces):
        found.add(part)
    return found


def prepared(method, W, X):
    return method.prepare(W, statistic(method.statistic, X) if method.statistic else None, "fc.weight")


# Selection


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 9),
    share=st.floats(0, 1),
    levels=st.integers(1, 5),
    compare=st.sampled_from(["tensor", "row"]),
)
def test_exactly_the_count_is_chosen_whatever_the_ties(rows, columns, share, levels, compare):
    scores = torch.randint(levels, (rows, columns)).float()
    count = int(share * rows * columns)
    mask = mask_by_score(scores, count, compare=compare)
    assert int((~mask).sum()) == count
    assert torch.equal(mask, mask_by_score(scores.clone(), count, compare=compare))
    if compare == "tensor" and 0 < count < mask.numel():
        assert scores[~mask].max() <= scores[mask].min()
    if compare == "row":
        each = (~mask).sum(dim=1)
        assert set(each.tolist()) <= {count // rows, -(-count // rows)}
        for row, kept in zip(scores, mask, strict=True):
            if 0 < int(kept.sum()) < columns:
                assert row[~kept].max() <= row[kept].min()


def test_of_equal_scores_the_lower_index_goes_first():
    assert mask_by_score(torch.ones(2, 4), 3).int().tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]
    assert mask_by_score(torch.ones(2, 4), 3, compare="row").int().tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]


def test_rows_share_a_rest_by_their_next_score():
    scores = torch.tensor([[1.0, 9.0], [2.0, 5.0], [3.0, 7.0]])
    assert mask_by_score(scores, 4, compare="row").int().tolist() == [[0, 1], [0, 0], [0, 1]]


def test_nan_is_kept_in_rows_as_everywhere():
    scores = torch.tensor([[math.nan, 1.0, math.inf]])
    assert mask_by_score(scores, 2, compare="row").int().tolist() == [[1, 0, 0]]


def test_blocks_are_compared_in_rows_of_blocks():
    scores = torch.tensor([[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0], [9.0, 9.0, 8.0, 8.0], [9.0, 9.0, 8.0, 8.0]])
    mask = mask_by_score(scores, 2, pattern=Block(2, 2), compare="row")
    assert mask.int().tolist() == [[0, 0, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2


def test_an_unknown_comparison_is_refused():
    with pytest.raises(ValueError, match="compare must be 'tensor' or 'row', got 'column'"):
        Wanda(compare="column")


# Wanda


def wanda_by_loop(W, X, removed_a_row):
    """For each output on its own: sort |w_j| * |X_j| and zero the first ones."""
    out = W.clone()
    for i in range(W.shape[0]):
        scores = [abs(float(W[i, j])) * float(X[:, j].double().square().sum().sqrt()) for j in range(W.shape[1])]
        for j in sorted(range(W.shape[1]), key=lambda j: scores[j])[:removed_a_row]:
            out[i, j] = 0.0
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.9])
def test_wanda_is_the_loop_over_outputs(sparsity, dtype):
    W, X = matrix(7, 20).to(dtype), inputs(50, 20)
    expected = wanda_by_loop(W, X, int(sparsity * 20))
    method = Wanda()
    method.prune(W, prepared(method, W, X), Block(), count=7 * int(sparsity * 20))
    assert torch.equal(W, expected)


def test_wanda_is_magnitude_where_all_inputs_are_alike():
    W, same = matrix(5, 8), matrix(5, 8)
    Wanda(compare="tensor").prune(W, {"norms": torch.full((8,), 3.0)}, Block(), count=13)
    Magnitude().prune(same, {}, Block(), count=13)
    assert torch.equal(W, same)


def test_norms_do_not_depend_on_how_the_inputs_are_cut():
    X = inputs(60, 7)
    expected = X.double().square().mean(0).sqrt().float()
    for kind in (InputNorms, Hessian):
        for pieces in (1, 7, 60):
            assert_close(statistic(kind, X, pieces).norms(), expected)


def test_a_statistic_of_half_precision_inputs_is_float32():
    X = inputs(40, 5).to(torch.bfloat16)
    assert_close(statistic(Hessian, X).matrix.double(), hessian(X), rtol=1e-5, atol=1e-5)


def test_no_rows_change_nothing():
    found = statistic(Hessian, inputs(10, 4))
    before = found.matrix.clone()
    found.add(torch.empty(0, 4))
    assert found.rows == 10
    assert torch.equal(found.matrix, before)


# SparseGPT


def hessian(X):
    """By the definition, in float64, where it is symmetric to the last bit that matters."""
    return 2 / len(X) * X.double().t() @ X.double()


def damped(H, damping=0.01):
    return H + damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)


def test_the_factor_is_the_cholesky_factor_of_the_inverse():
    H = hessian(inputs(100, 30))
    U, added = inverse_factor(H)
    assert added == pytest.approx(0.01 * float(H.diagonal().mean()))
    assert_close(U, torch.linalg.cholesky(torch.linalg.inv(damped(H)), upper=True))
    U32, _ = inverse_factor(H.float())
    assert_close(U32.double(), U, rtol=1e-4, atol=1e-4)


def least_squares_by_column(W, H, mask_of_block, block):
    """The definition: freeze column after column; the columns to the right are the exact minimiser, solved anew.

    Minimise (v - w) H (v - w) over the entries to the right of j, those up to j being given.
    """
    V = W.clone()
    mask = torch.zeros(W.shape, dtype=torch.bool)
    for start in range(0, W.shape[1], block):
        end = min(start + block, W.shape[1])
        mask[:, start:end] = mask_of_block(V, start, end)
        for j in range(start, end):
            V[mask[:, j], j] = 0.0
            left, right = slice(0, j + 1), slice(j + 1, None)
            change = (V - W)[:, left] @ H[left, right] @ torch.linalg.inv(H[right, right])
            V[:, right] = W[:, right] - change
    return V, mask


@pytest.mark.parametrize("block", [1, 4, 5, 24])
def test_sparsegpt_is_exact_constrained_least_squares_column_by_column(block):
    rows, columns, count = 6, 24, 71
    W, X = matrix(rows, columns).double(), inputs(200, columns)
    H = damped(hessian(X))
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)

    def mask_of_block(V, start, end):
        # The rise of the error if one entry went alone: w^2 / [inverse of what is not yet frozen]_jj, least first.
        mask = torch.zeros(rows, end - start, dtype=torch.bool)
        scores = torch.stack([V[:, j].square() / torch.linalg.inv(H[j:, j:])[0, 0] for j in range(start, end)], dim=1)
        number = count * end // columns - count * start // columns
        mask.view(-1)[scores.flatten().argsort()[:number]] = True
        return mask

    expected, mask = least_squares_by_column(W, H, mask_of_block, block)
    found, loss = compensate(W, U, torch.zeros(columns, dtype=torch.bool), count=count, block=block)
    assert int((found == 0).sum()) == int(mask.sum()) == count
    assert_close(found, expected)
    change = found - W
    assert loss == pytest.approx(float((change @ H * change).sum()))


def test_sparsegpt_in_float32_is_the_same_to_its_precision():
    W, X = matrix(6, 24), inputs(200, 24)
    method = SparseGPT(block=8)
    H = damped(hessian(X))
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    expected, _ = compensate(W.double(), U, torch.zeros(24, dtype=torch.bool), count=72, block=8)
    method.prune(W, prepared(method, W, X), Block(), count=72)
    assert_close(W.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_error_is_the_share_of_the_output_that_is_lost():
    W, X = matrix(10, 24), inputs(300, 24)
    dense, method = W.clone(), SparseGPT()
    error = method.prune(W, prepared(method, W, X), Block(), count=120)
    lost = (X.double() @ (W - dense).double().t()).square().sum() / (X.double() @ dense.double().t()).square().sum()
    assert error == pytest.approx(float(lost), rel=1e-3)


def output_error(method, W, X, count, pattern=None):
    V = W.clone()
    method.prune(V, prepared(method, W, X), pattern or Block(), count)
    return float((X @ (V - W).t()).square().sum())


@pytest.mark.parametrize("pattern", [None, NM(2, 4)])
def test_sparsegpt_beats_wanda_beats_magnitude_on_the_output(pattern):
    W, X = matrix(32, 64), inputs(500, 64)
    methods = [SparseGPT(), Wanda(), Magnitude(compare="row")]
    errors = [output_error(method, W, X, 32 * 32, pattern) for method in methods]
    assert errors[0] < errors[1] < errors[2]


@given(rows=st.integers(1, 5), columns=st.integers(1, 12), block=st.integers(1, 13), share=st.floats(0, 1))
def test_sparsegpt_removes_exactly_the_count(rows, columns, block, share):
    W, X = matrix(rows, columns), inputs(30, columns)
    method, count = SparseGPT(block=block), int(share * rows * columns)
    method.prune(W, prepared(method, W, X), Block(), count)
    assert int((W == 0).sum()) == count


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 4), NM(3, 8)])
@pytest.mark.parametrize("method", [Magnitude(), Wanda(), SparseGPT(), SparseGPT(block=6)], ids=str)
def test_n_of_each_m_are_left(method, pattern):
    W, X = matrix(5, 24), inputs(100, 24)
    method.prune(W, prepared(method, W, X), pattern, count=0)
    assert ((W != 0).view(5, -1, pattern.m).sum(-1) == pattern.n).all()


def test_n_m_in_sparsegpt_looks_at_what_the_columns_before_left():
    """By the definition: the mask of a group is chosen when its first column is reached."""
    W, X = matrix(6, 16).double(), inputs(200, 16)
    H = damped(hessian(X))
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)

    def mask_of_group(V, start, end):
        scores = torch.stack([V[:, j].square() / torch.linalg.inv(H[j:, j:])[0, 0] for j in range(start, end)], dim=1)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.argsort(1)[:, :2], True)

    expected, _ = least_squares_by_column(W, H, mask_of_group, 4)
    found, _ = compensate(W, U, torch.zeros(16, dtype=torch.bool), pattern=NM(2, 4))
    assert_close(found, expected)


def test_weights_that_are_zero_already_cost_nothing():
    W, X = matrix(8, 16), inputs(100, 16)
    Magnitude().prune(W, {}, Block(), count=64)
    before, method = W.clone(), SparseGPT()
    assert method.prune(W, prepared(method, W, X), Block(), count=0) == 0.0
    assert torch.equal(W, before)


def test_a_matrix_stored_the_other_way_round_or_in_half_precision_is_pruned_in_place():
    W, X = matrix(6, 16), inputs(100, 16)
    method = SparseGPT()
    known = prepared(method, W, X)
    stored, half = W.t().contiguous(), W.to(torch.bfloat16)
    expected = W.clone()
    method.prune(expected, known, Block(), count=48)
    method.prune(stored.t(), known, Block(), count=48)
    method.prune(half, known, Block(), count=48)
    assert torch.equal(stored.t(), expected)
    assert int((half == 0).sum()) == 48
    assert_close(half.float(), expected, rtol=0.05, atol=0.05)


def test_columns_whose_input_is_always_zero_go_first_and_count(caplog):
    W, X = matrix(6, 12), inputs(100, 12)
    X[:, [2, 7]] = 0.0
    method = SparseGPT(block=5)
    with caplog.at_level(logging.WARNING):
        known = prepared(method, W, X)
    assert "fc.weight: 2 of 12 inputs are always 0" in caplog.text
    method.prune(W, known, Block(), count=36)
    assert (W[:, [2, 7]] == 0).all()
    assert int((W == 0).sum()) == 36
    assert W.isfinite().all()


def test_all_inputs_zero_leaves_no_weight():
    W, method = matrix(2, 4), SparseGPT()
    assert method.prune(W, prepared(method, W, torch.zeros(5, 4)), Block(), count=4) == 0.0
    assert (W == 0).all()


def test_a_failing_cholesky_raises_the_damping_and_says_so(caplog):
    H = torch.full((3, 3), 2.0).fill_diagonal_(1.0)  # smallest eigenvalue -1: damping 1 is not enough, 10 is
    with caplog.at_level(logging.WARNING):
        U, added = inverse_factor(H, name="h.3.fc")
    assert [record.getMessage() for record in caplog.records] == [
        f"h.3.fc: H is not positive definite in float32; damping raised to {x}." for x in ("0.1", "1", "10")
    ]
    assert added == pytest.approx(10.0)
    assert_close(U.t() @ U @ (H + 10.0 * torch.eye(3)), torch.eye(3))


def test_no_damping_where_some_is_needed_becomes_some(caplog):
    X = inputs(3, 8)  # rank 3
    with caplog.at_level(logging.WARNING):
        _, added = inverse_factor(statistic(Hessian, X).matrix, damping=0.0)
    assert "damping raised to 0.01" in caplog.text
    assert added > 0.0


def test_a_matrix_that_no_damping_mends_is_refused():
    H = torch.full((3, 3), 1e5).fill_diagonal_(1.0)
    with pytest.raises(
        ValueError, match=r"H of h\.3\.fc is not positive definite even with damping 100 .*began with 0\.01"
    ):
        inverse_factor(H, name="h.3.fc")


def test_too_few_samples_are_damped_not_fatal(caplog):
    W, X, method = matrix(4, 32), inputs(5, 32), SparseGPT()
    method.prune(W, prepared(method, W, X), Block(), count=64)
    assert W.isfinite().all()
    assert caplog.records == []


@pytest.mark.parametrize("method", [Wanda(), SparseGPT()], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_refused(bad, method):
    X = inputs(10, 4)
    X[3, 2] = bad
    with pytest.raises(ValueError, match=r"calibration inputs of fc\.weight hold NaN or infinity"):
        prepared(method, matrix(2, 4), X)


@pytest.mark.parametrize(("field", "value"), [("damping", -0.1), ("damping", math.nan), ("block", 0)])
def test_bad_options_of_sparsegpt_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        SparseGPT(**{field: value})


# The precision of products


@pytest.fixture
def precision():
    """The global setting, put back after the test."""
    names = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in names:
        backend.fp32_precision = "none"


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_older_global_setting_is_put_back(setting):
    torch.set_float32_matmul_precision(setting)
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == setting
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == before


@pytest.mark.usefixtures("precision")
def test_the_newer_global_setting_is_put_back_after_an_error_too():
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    def fail():
        with full_float32():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_untouched_settings_stay_untouched():
    before = torch.backends.cuda.matmul.fp32_precision
    with full_float32():
        pass
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_scores_of_half_precision_weights_are_float32():
    assert wanda_scores(matrix(2, 3).half(), torch.ones(3)).dtype == torch.float32
