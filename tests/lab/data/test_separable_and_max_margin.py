"""The data of Appendix D, and the solver's max-margin solutions against their optimality conditions."""

import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from horst.lab.data.max_margin import NotSeparableError, l1_dual_correlations, max_margin, norm_of
from horst.lab.data.separable import log_loss, loss_gradient, sparse_teacher_data

GEOMETRIES = ("l1", "l2", "linf")


@pytest.fixture(scope="module")
def data():
    return sparse_teacher_data((0, 1))


def test_the_teacher_separates_the_data_and_is_sparse(data):
    assert data.z.shape == (2, 80, 100)
    assert bool((data.z @ data.teacher > 0).all())
    assert data.support.nonzero().flatten().tolist() == [0, 1]


def test_a_seed_gives_its_own_data_whatever_stands_beside_it(data):
    assert_close(sparse_teacher_data((1,)).z[0], data.z[1])
    assert_close(sparse_teacher_data((1,), dtype=torch.float32).z[0].double(), data.z[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"teacher": ()}, "1 to n_features=100 values, got 0"),
        ({"teacher": (1.0, 0.0)}, "finite and not zero"),
        ({"seeds": ()}, "at least one seed"),
        ({"teacher": (1.0, 2.0), "n_features": 1}, "1 to n_features=1 values, got 2"),
    ],
)
def test_bad_data_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        sparse_teacher_data(**arguments)


def test_loss_and_gradient_agree_with_autograd(data):
    theta = 0.1 * torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta.requires_grad_()
    loss = torch.exp(-(theta @ data.z.mT)).mean(-1)
    assert_close(log_loss(theta, data.z), loss.log())
    assert_close(loss_gradient(theta.detach(), data.z), torch.autograd.grad(loss.sum(), theta)[0])


def test_the_log_loss_goes_on_where_the_loss_underflows():
    z = torch.ones(1, 4, 1, dtype=torch.float64)
    assert float(log_loss(torch.full((1, 1, 1), 1e4, dtype=torch.float64), z)) == pytest.approx(-1e4)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_solutions_have_margin_one_and_no_other_direction_does_better(data, geometry):
    z = data.z[0]
    best = max_margin(z, geometry)
    assert float((z @ best).min()) == pytest.approx(1.0, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-4, 1e-2, 1.0):
        for _ in range(200):
            other = best + scale * best.abs().mean() * torch.randn(100, generator=generator, dtype=torch.float64)
            margin = float((z @ other).min())
            if margin > 0:
                assert float(norm_of(other / margin, geometry)) >= float(norm_of(best, geometry)) * (1 - 1e-9)
    for rival in GEOMETRIES:
        assert float(norm_of(max_margin(z, rival), geometry)) >= float(norm_of(best, geometry)) * (1 - 1e-9)


def test_the_l2_solution_satisfies_the_kkt_conditions_to_1e_8(data):
    z = data.z[0]
    theta = max_margin(z, "l2")
    active = (z @ theta) < 1 + 1e-8
    multipliers = torch.linalg.lstsq(z[active].T, theta.unsqueeze(-1)).solution.squeeze(-1)
    assert bool((multipliers > -1e-8).all())
    assert_close(z[active].T @ multipliers, theta, rtol=0, atol=1e-8)
    # Strong duality: ||theta||^2 equals the sum of the multipliers.
    assert float(theta.square().sum()) == pytest.approx(float(multipliers.sum()), rel=1e-8)


def test_the_l1_solution_satisfies_the_kkt_conditions_to_1e_8(data):
    z = data.z[0]
    theta, c = max_margin(z, "l1"), l1_dual_correlations(z)
    support = theta.abs() > 1e-9
    assert_close(c[support], theta[support].sign(), rtol=0, atol=1e-8)
    assert float(c[~support].abs().max()) <= 1 + 1e-8


def test_the_linf_solution_by_hand():
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert_close(max_margin(z, "linf"), torch.ones(2, dtype=torch.float64))
    z = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    assert_close(max_margin(z, "linf"), torch.full((2,), 0.25, dtype=torch.float64))
    assert_close(max_margin(z, "l1"), torch.tensor([1 / 3, 0.0], dtype=torch.float64))
    assert_close(max_margin(z, "l2"), torch.tensor([0.3, 0.1], dtype=torch.float64))


def test_signs_restrict_the_l1_solution(data):
    z = data.z[0]
    free, positive = max_margin(z, "l1"), max_margin(z, "l1", signs=torch.ones(100))
    assert bool((positive >= 0).all())
    assert float(norm_of(positive, "l1")) > float(norm_of(free, "l1"))
    assert_close(max_margin(z, "l1", signs=torch.where(free < 0, -1.0, 1.0)), free, rtol=1e-7, atol=1e-9)
    c = l1_dual_correlations(z, signs=torch.ones(100))
    assert_close(c[positive > 1e-9], torch.ones(int((positive > 1e-9).sum()), dtype=torch.float64))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_data_that_cannot_be_separated_say_so(geometry):
    z = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    with pytest.raises(NotSeparableError, match="separates the data"):
        max_margin(z, geometry)


def test_bad_calls_are_refused():
    z = torch.eye(2, dtype=torch.float64)
    with pytest.raises(NotSeparableError, match="this sign pattern"):
        max_margin(z, "l1", signs=-torch.ones(2))
    with pytest.raises(ValueError, match="one data set"):
        max_margin(z.unsqueeze(0), "l1")
    with pytest.raises(ValueError, match="got 'l3'"):
        max_margin(z, "l3")
    with pytest.raises(ValueError, match="L1 problem alone"):
        max_margin(z, "l2", signs=torch.ones(2))


def test_the_lab_imports_without_its_extra():
    """Every module loads with torch alone; scipy, matplotlib and tyro are asked for on use."""
    code = """
import sys
for name in ("scipy", "matplotlib", "tyro"):
    sys.modules[name] = None
import pkgutil, importlib, torch
import horst.lab.data, horst.lab.experiments, horst.lab.models, horst.operators, horst.lab.report
for package in (horst.lab.data, horst.lab.experiments, horst.lab.models, horst.operators, horst.lab.report):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from horst.lab.data.max_margin import max_margin
try:
    max_margin(torch.eye(2), "l1")
except ModuleNotFoundError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert 'from a checkout of horst: pip install ".[lab]"' in found.stdout
