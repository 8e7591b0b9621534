"""The chunked head and loss against torch's own, in float64 and under autocast, eager and traced."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from horst.lab.models.linear_cross_entropy import IGNORED, linear_cross_entropy


def problem(tokens=23, width=6, vocabulary=11, ignored=(0, 7), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[[i for i in ignored if i < tokens]] = IGNORED
    return hidden, weight, targets


def loss_and_gradients(function, hidden, weight, targets):
    loss = function(hidden, weight, targets)
    return loss, *torch.autograd.grad(3.0 * loss, (hidden, weight))


def plain(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight.T, targets)


@given(
    tokens=st.integers(2, 30),
    rows=st.one_of(st.none(), st.integers(1, 40)),
    ignored=st.sets(st.integers(1, 29)),
    seed=st.integers(0, 5),
)
def test_loss_and_gradients_are_those_of_the_whole_logits(tokens, rows, ignored, seed):
    case = problem(tokens=tokens, ignored=ignored, seed=seed)
    ours = loss_and_gradients(lambda *args: linear_cross_entropy(*args, rows=rows), *case)
    assert_close(ours, loss_and_gradients(plain, *case), rtol=1e-12, atol=1e-14)


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, targets = problem()
    with torch.no_grad():
        assert_close(linear_cross_entropy(hidden, weight, targets, rows=5), plain(hidden, weight, targets))


@pytest.mark.parametrize("rows", [None, 4])
def test_nothing_to_score_is_a_loss_of_zero(rows):
    hidden, weight, targets = problem()
    targets[:] = IGNORED
    loss, *grads = loss_and_gradients(lambda *args: linear_cross_entropy(*args, rows=rows), hidden, weight, targets)
    assert loss == 0
    assert all((grad == 0).all() for grad in grads)


def test_under_autocast_the_error_is_at_most_twice_that_of_the_whole_logits():
    exact = loss_and_gradients(plain, *problem(tokens=64, vocabulary=50))

    def errors(rows):
        with torch.autocast("cpu", torch.bfloat16):
            case = problem(tokens=64, vocabulary=50, dtype=torch.float32)
            found = loss_and_gradients(lambda *args: linear_cross_entropy(*args, rows=rows), *case)
        assert [t.dtype for t in found] == [torch.float32] * 3
        return [(a.double() - b).norm().item() for a, b in zip(found, exact, strict=True)]

    for chunked, whole in zip(errors(16), errors(None), strict=True):
        assert 0 < chunked <= 2 * whole


# torch 2.11 warns of its own tracing of an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("rows", [None, 5])
def test_a_traced_graph_gives_the_same(rows):
    case = problem()

    def function(*args):
        return linear_cross_entropy(*args, rows=rows)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(loss_and_gradients(compiled, *case), loss_and_gradients(function, *case))


def test_no_tensor_is_larger_than_a_piece_of_the_logits():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else [out]
            self.numel = max(self.numel, *(t.numel() for t in tensors if isinstance(t, torch.Tensor)), 0)
            return out

    case = problem(tokens=100, width=4, vocabulary=50)
    with Largest() as mode:
        loss_and_gradients(lambda *args: linear_cross_entropy(*args, rows=10), *case)
    assert mode.numel == 10 * 50


def test_a_second_derivative_is_refused_rather_than_wrong():
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets, rows=5) ** 2
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("target", [11, -5])
def test_a_target_beyond_the_vocabulary_is_refused(rows, target):
    hidden, weight, targets = problem()
    targets[3] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets, rows=rows)


def test_bad_input_is_refused():
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match=r"Flatten batch and sequence"):
        linear_cross_entropy(hidden[None], weight, targets[None])
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        linear_cross_entropy(hidden, weight, targets, rows=0)
