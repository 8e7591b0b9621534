"""The README and the docs: code runs, links and anchors lead somewhere, and code fits the page."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
WIDTH = 105  # characters of code that fit a window of 1280 pixels


def prose(page):
    return FENCED.sub("", page.read_text())


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_code_on_the_page_runs(page, capsys, tmp_path, monkeypatch):
    """A page from top to bottom in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        exec(compile("\n" * (line - 1) + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose(page)):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to #{anchor}, which is no heading of {file.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_is_not_cut_at_the_edge_of_the_page(page):
    lines = [line for block in FENCED.findall(page.read_text()) for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if ROOT / "docs" in page.parents]
    assert sorted(navigation) == pages


def test_the_readme_is_a_screen_and_a_half():
    readme = (ROOT / "README.md").read_text()
    generated = re.sub(r"<!-- table:\w+ -->.*?<!-- /table -->", "", readme, flags=re.DOTALL)
    assert len(generated.splitlines()) <= 125
    assert "make quickstart" in readme
    assert "make test" in readme
