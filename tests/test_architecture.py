"""The layout is the architecture: imports point one way, and ``import horst`` needs torch alone."""

import ast
import pathlib
import subprocess
import sys

import pytest

import horst

ROOT = pathlib.Path(horst.__file__).parent
# A folder may import those before it, never those after it.
ORDER = [
    "extras", "fields", "files", "user_warnings", "parameters", "operators", "kernels", "optimizers", "sparsity",
    "pruning", "export", "training", "recovery", "integrations", "lab", "cli",
]  # fmt: skip
LAB = ["models", "baselines", "data", "experiments", "report"]  # of these, the same
FILES = sorted(ROOT.rglob("*.py"))


def folder_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: pathlib.Path) -> set[str]:
    package = ["horst", *path.relative_to(ROOT).with_suffix("").parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = folder_of(path)
    if here == "__init__":
        return
    assert here in ORDER, f"src/horst/{here} is not in the list of folders: add it where it belongs"
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "horst" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(here), f"{path} imports {name}, which stands below it"


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p) == "lab"], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_of_the_lab_point_one_way(path):
    here = path.relative_to(ROOT / "lab").parts[0]
    if here in LAB:
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[:2] == ["horst", "lab"] and len(parts) > 2 and parts[2] in LAB:
                assert LAB.index(parts[2]) <= LAB.index(here), f"{path} imports {name}, which stands below it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_knows_the_lab(path):
    if folder_of(path) not in ("lab", "cli"):
        assert [n for n in imported_modules(path) if n.startswith("horst.lab")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_masks_and_files_work_for_any_optimizer(path):
    if folder_of(path) in ("parameters", "sparsity", "pruning", "export"):
        assert [n for n in imported_modules(path) if n.startswith("horst.optimizers")] == []


def test_no_file_is_too_long():
    assert [str(p.relative_to(ROOT)) for p in FILES if len(p.read_text().splitlines()) > 400] == []


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p) == "operators"], ids=lambda p: p.name)
def test_operators_know_nothing_of_the_rest(path):
    ours = [n for n in imported_modules(path) if n.startswith("horst.") and not n.startswith("horst.operators")]
    assert ours == []


def test_import_horst_needs_torch_alone():
    """In a fresh interpreter, all public names load nothing that torch itself does not load."""
    code = (
        "import torch, sys; before = {m.split('.')[0] for m in sys.modules}; "
        "import horst; [getattr(horst, n) for n in horst.__all__]; "
        "after = {m.split('.')[0] for m in sys.modules}; "
        "print(*sorted(m for m in after - before - {'horst'} if m not in sys.stdlib_module_names and m[0] != '_'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_import_horst_alone_does_not_wait_for_torch():
    code = "import horst, sys; print('torch' in sys.modules, horst.__version__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", horst.__version__]


def test_public_names_exist_and_are_documented():
    for name in horst.__all__:
        thing = getattr(horst, name)
        assert (thing.__doc__ or "").strip(), f"horst.{name} has no docstring"
        if not isinstance(thing, type(horst)):
            assert "Example" in thing.__doc__, f"horst.{name} has no example"


def test_public_names_are_in_the_documentation():
    reference = ROOT.parents[1] / "docs" / "api.md"
    text = reference.read_text()
    assert [name for name in horst.__all__ if f"horst.{name}" not in text] == []


def test_nothing_prints():
    """The library speaks through logging; only the command line prints."""
    for path in FILES:
        if folder_of(path) in ("cli", "lab"):
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        printing = [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert printing == [], f"{path} prints on lines {printing}"
