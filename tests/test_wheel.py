"""The wheel, installed beside torch and nothing else: the library works, and the lab says what to install."""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from horst import __version__

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = """
import torch
from torch import nn

import horst
from horst.export import load_sparse, save_sparse
from horst.pruning import prune

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
optimizer = horst.HORST(horst.param_groups(model, weight_decay=0.01, alpha=5.0), lr=1e-3)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
assert prune(model, 0.5, method="sparsegpt", data=[torch.randn(16, 8)]).zeros == 96
weights = [p.clone() for p in model.parameters()]
path = save_sparse(model, "model.sparse.safetensors")
with torch.no_grad():
    for p in model.parameters():
        p.fill_(1)
load_sparse(path, model)
assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
print(horst.__file__)
"""


def needed_by(distribution: str) -> set[str]:
    """The distribution and, of those that it requires, all that are installed."""
    found, waiting = set(), [distribution]
    while waiting:
        name = waiting.pop()
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.split(r"[^\w.-]", text)[0] for text in requirements if "extra ==" not in text]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for ``python -S``: the wheel's files, and links to torch and what torch requires."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("horst_optim-*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / "ours")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    (folder / "torch_alone").mkdir()
    for name in needed_by("torch"):
        files = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in files.files or []} - {"..", "__pycache__"}:
            if not (link := folder / "torch_alone" / top).exists():
                link.symlink_to(files.locate_file(top))
    path = os.pathsep.join([str(folder / "ours"), str(folder / "torch_alone")])
    # torch itself warns that it has no NumPy
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def python(environment, folder, *words):
    return subprocess.run(
        [sys.executable, "-S", *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_a_step_a_pruning_and_an_export_need_torch_alone(environment, tmp_path):
    done = python(environment, tmp_path, "-c", LIBRARY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(environment["PYTHONPATH"].split(os.pathsep)[0])


@pytest.mark.parametrize("package", ["numpy", "safetensors", "transformers", "timm", "tyro", "rich"])
def test_the_environment_has_no_optional_package(environment, tmp_path, package):
    assert "ModuleNotFoundError" in python(environment, tmp_path, "-c", f"import {package}").stderr


@pytest.mark.parametrize("command", ["quickstart", "run figure6", "prune model --sparsity 0.5"])
def test_a_command_of_the_lab_says_what_to_install_in_one_line(environment, tmp_path, command):
    done = python(environment, tmp_path, "-m", "horst.cli", *command.split())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert 'from a checkout of horst: pip install ".[lab]"' in line


def test_help_version_and_doctor_need_no_extra(environment, tmp_path):
    assert "usage: horst COMMAND" in python(environment, tmp_path, "-m", "horst.cli", "--help").stdout
    assert __version__ in python(environment, tmp_path, "-m", "horst.cli", "--version").stdout
    shown = python(environment, tmp_path, "-m", "horst.cli", "doctor")
    assert shown.returncode == 0, shown.stderr
    assert 'pip install ".[lab]"' in shown.stdout
    found = json.loads(python(environment, tmp_path, "-m", "horst.cli", "doctor", "--json").stdout)
    assert found["versions"]["horst"] == __version__
    assert {row["version"] for row in found["packages"] if row["package"] == "tyro"} == {"not installed"}
