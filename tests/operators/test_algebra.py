"""A @ B, A + B, c * A, bracket: values, state, shapes, errors."""

import ast
import dataclasses
import pathlib

import pytest
import torch
from torch.testing import assert_close

import horst.operators
from horst.operators import (
    L2,
    Adam,
    Composition,
    Entropy,
    HyperbolicEntropy,
    Identity,
    LInf,
    Memoryless,
    Mirror,
    Operator,
    Spectral,
    Steepest,
    bracket,
    dual_step,
    split_mirror,
)

S, M, A = Steepest(L2()), Mirror(HyperbolicEntropy(0.5)), Adam()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


theta, g = random(4, 6), random(4, 6, seed=1)


def test_composition_applies_the_right_one_first():
    assert_close((M @ S)(theta, g), M(theta, S(theta, g)))
    assert_close((S @ M)(theta, g), S(theta, M(theta, g)))


def test_composition_is_associative_and_stored_flat():
    assert (M @ S) @ M == M @ (S @ M)
    assert isinstance((M @ S) @ M, Composition)
    assert len(((M @ S) @ (M @ S)).parts) == 4


def test_identity_is_the_unit():
    for operator in (S, M, M @ S):
        assert_close((Identity() @ operator)(theta, g), operator(theta, g))
        assert_close((operator @ Identity())(theta, g), operator(theta, g))


def test_sum_difference_multiple_and_negation():
    assert_close((S + M)(theta, g), S(theta, g) + M(theta, g))
    assert_close((S - M)(theta, g), S(theta, g) - M(theta, g))
    assert_close((2 * S)(theta, g), 2 * S(theta, g))
    assert_close((S * 2)(theta, g), 2 * S(theta, g))
    assert_close((-S)(theta, g), -S(theta, g))
    assert_close((M @ (S + 3.0 * Identity()))(theta, g), M(theta, S(theta, g) + 3.0 * g))


def test_bracket_is_antisymmetric():
    assert_close(bracket(S, M)(theta, g), -bracket(M, S)(theta, g))


@pytest.mark.parametrize("operator", [S, M, M @ S, S + M, 2.0 * S, Identity(), Steepest(LInf())])
def test_leading_dimensions_are_a_batch(operator):
    rows = torch.stack([operator(theta[i], g[i]) for i in range(4)])
    assert_close(operator(theta, g), rows)
    assert_close(operator(theta.reshape(2, 2, 6), g.reshape(2, 2, 6)), rows.reshape(2, 2, 6))


def test_stateful_parts_give_a_stateful_operator_of_the_same_kind():
    for operator in (M @ A, A @ M, A + M, 2.0 * A, bracket(A, M), M @ (A + S) @ M):
        assert isinstance(operator, Operator)
        assert operator.is_stateful
        direction, state = operator.update(theta, g, operator.init(theta))
        assert direction.shape == theta.shape
        assert state.keys() == operator.init(theta).keys()
    assert not (M @ S).is_stateful


def test_the_only_state_keeps_torchs_names_and_two_get_a_prefix():
    assert set((M @ A).init(theta)) == {"step", "exp_avg", "exp_avg_sq"}
    assert set((A @ M @ A).init(theta)) == {f"{i}.{k}" for i in (0, 2) for k in ("step", "exp_avg", "exp_avg_sq")}
    nested = (A @ M) + (A @ A)  # a prefix within a prefix is split again
    direction, state = nested.update(theta, g, nested.init(theta))
    again, _ = nested.update(theta, g, state)
    first, inner_state = A.update(theta, M(theta, g), A.init(theta))
    assert_close(state["0.exp_avg"], inner_state["exp_avg"])
    assert_close(direction - first, (A @ A).update(theta, g, (A @ A).init(theta))[0])
    assert again.shape == direction.shape


def test_exp_adam_and_adam_exp_are_the_two_orders():
    adam_of_g, _ = A.update(theta, g, A.init(theta))
    exp_adam, _ = (M @ A).update(theta, g, (M @ A).init(theta))
    assert_close(exp_adam, M(theta, adam_of_g))
    adam_exp, _ = (A @ M).update(theta, g, (A @ M).init(theta))
    assert_close(adam_exp, A.update(theta, M(theta, g), A.init(theta))[0])


def test_update_changes_nothing_in_place():
    operator = M @ A
    state = operator.init(theta)
    before = {key: value.clone() for key, value in state.items()}
    theta_before, g_before = theta.clone(), g.clone()
    operator.update(theta, g, state)
    assert_close(theta, theta_before)
    assert_close(g, g_before)
    for key, value in state.items():
        assert_close(value, before[key])


def test_calling_an_operator_with_memory_says_how_to_step_it():
    with pytest.raises(TypeError, match=r"has memory.*state = operator.init\(theta\)"):
        (M @ A)(theta, g)


def test_an_own_operator_needs_one_method():
    @dataclasses.dataclass(frozen=True)
    class Clip(Memoryless):
        limit: float

        def __call__(self, theta, g):
            return g.clamp(-self.limit, self.limit)

    assert_close((M @ Clip(0.1))(theta, g), M(theta, g.clamp(-0.1, 0.1)))


def test_operators_are_frozen_and_compare_by_value():
    assert Mirror(HyperbolicEntropy(0.5)) @ Steepest(L2()) == M @ S
    assert len({M @ S, Mirror(HyperbolicEntropy(0.5)) @ Steepest(L2())}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        S.norm = LInf()


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: S @ LInf(), TypeError, "got LInf. Wrap norms in Steepest"),
        (lambda: 3 @ S, TypeError, "got int"),
        (lambda: S + Entropy(), TypeError, r"in \+, got Entropy"),
        (lambda: S - 1, TypeError, "in -, got int"),
        (lambda: S * M, TypeError, "Use A @ B"),
        (lambda: "2" * S, TypeError, "real number, got str"),
        (lambda: float("nan") * S, ValueError, "finite, got nan"),
        (lambda: bracket(S, 1.0), TypeError, "got float"),
        (lambda: Steepest(LInf), TypeError, "not the class"),
        (lambda: Mirror(LInf()), TypeError, "wrap a function of your own"),
        (lambda: split_mirror(S @ M), ValueError, "begins with a mirror"),
    ],
)
def test_bad_algebra_says_what_to_do(build, error, text):
    with pytest.raises(error, match=text):
        build()


@pytest.mark.parametrize("operator", [S, M, Identity(), Steepest(LInf())])
def test_shapes_that_do_not_fit_are_refused(operator):
    with pytest.raises(ValueError, match=r"same shape, got \(3,\) and \(4,\)"):
        operator(torch.ones(3), torch.ones(4))


def test_vector_and_matrix_operators_refuse_too_few_dimensions():
    with pytest.raises(ValueError, match=r"acts on a vector .* got shape \(\)"):
        S(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"acts on a matrix .* got shape \(3,\)"):
        Steepest(Spectral())(torch.ones(3), torch.ones(3))


def test_dual_step_of_a_composition():
    operator = Mirror(Entropy()) @ S @ M
    new, state = dual_step(operator, theta, g, operator.init(theta), 0.1)
    assert_close(new, theta * torch.exp(-0.1 * theta.sign() * (S @ M)(theta, g)))
    assert state == {}


def test_operators_import_torch_and_nothing_else_of_ours():
    folder = pathlib.Path(horst.operators.__file__).parent
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("horst") or name.startswith("horst.operators"), f"{file.name}: {name}"
