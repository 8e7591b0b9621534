"""Optional packages: a missing one names its extra, and the table of extras follows pyproject.toml."""

import ast
import pathlib
import re
import sys

import pytest

import horst
from horst.extras import EXTRA_OF, load_extra

PYPROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[lab\]"'):
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


def test_the_lab_extra_is_exactly_what_the_lab_and_the_command_line_load():
    """Nothing in it is only the library's or nobody's."""
    root = pathlib.Path(horst.__file__).parent
    used = set()
    for path in [*(root / "lab").rglob("*.py"), *(root / "cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_extra":
                used |= {arg.value.partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    listed = re.search(r"^lab = \[(.*?)\]$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)[1]
    names = {{"scikit-learn": "sklearn"}.get(name, name) for name in re.findall(r'"([\w-]+)', listed)}
    assert names == {package for package in used if EXTRA_OF[package] == "lab"}
