"""Optional packages: a missing one names its extra, and the table of extras follows pyproject.toml."""

import pathlib
import re
import sys

import pytest

from horst.extras import EXTRA_OF, load_extra

PYPROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "horst-optim\[lab\]"'):
        load_extra("scipy.optimize")


def test_a_fault_inside_the_package_is_not_called_missing(monkeypatch):
    monkeypatch.setattr("importlib.import_module", _fail)
    with pytest.raises(ModuleNotFoundError, match="no_other_package"):
        load_extra("scipy.optimize")


def _fail(name):
    raise ModuleNotFoundError("No module named 'no_other_package'", name="no_other_package")


@pytest.mark.parametrize("package", [p for p in EXTRA_OF if p != "jax"])  # optax brings jax
def test_the_extra_lists_the_package(package):
    listed = re.search(rf"^{EXTRA_OF[package]} = \[(.*?)\]$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    distribution = {"sklearn": "scikit-learn"}.get(package, package)
    assert f'"{distribution}' in listed[1], f"pyproject.toml's extra {EXTRA_OF[package]} does not bring {package}"
