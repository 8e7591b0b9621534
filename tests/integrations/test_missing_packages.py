"""A missing package is named with the command that installs it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "missing", "install"),
    [
        ("optax", "optax", r'pip install "\.\[optax\]"'),
        ("timm", "timm.optim._optim_factory", r'pip install "\.\[vision\]"'),
        ("peft", "peft", r'pip install "\.\[peft\]"'),
    ],
)
def test_a_missing_package_says_how_to_install_it(module, missing, install, monkeypatch):
    monkeypatch.delitem(sys.modules, f"horst.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=install):
        importlib.import_module(f"horst.integrations.{module}")
