"""The pages' tables come from the committed result files, and are up to date."""

import pathlib
import re

import matplotlib
import pytest

from horst.lab.experiments.result import Result
from horst.lab.report import pages
from horst.lab.report.figures import save_figure
from horst.lab.report.tables import origins, rewrite_blocks

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_tables_of_the_page_are_those_of_the_result_files(page):
    text = (ROOT / page).read_text()
    assert pages.rewrite_page(text, ROOT) == text, f"run python -m horst.lab.report.pages: {page} is out of date"


@pytest.mark.parametrize("name", pages.TABLES)
def test_every_table_is_on_a_page_and_its_files_say_where_they_come_from(name):
    assert any(f"<!-- table:{name} -->" in (ROOT / page).read_text() for page in pages.PAGES)
    for file in pages.TABLES[name][0]:
        environment = Result.load(ROOT / file).environment
        assert {"commit", "torch", "python", "device"} <= set(environment)


def test_files_of_one_machine_share_a_line_that_names_each_ones_commit():
    def result(commit, device, seconds):
        environment = {"commit": commit, "device": device, "torch": "2.11.0", "python": "3.12"}
        return Result(experiment="x", config={}, rows=[], curves={}, notes=[], environment=environment, seconds=seconds)

    results = [result("a" * 40, "H200", 10.0), result("c" * 40, "x86_64", 7.0), result("b" * 40, "H200", 20.4)]
    assert origins(["1.json", "2.json", "3.json"], results).split("\n\n") == [
        f"`1.json` ({'a' * 12}), `3.json` ({'b' * 12}): 30 s on H200, torch 2.11.0; in brackets the commit.",
        f"`2.json`: 7 s on x86_64, torch 2.11.0, commit {'c' * 12}.",
    ]
    alike = [result("a" * 40, "H200", 1.0), result("a" * 40, "H200", 2.0)]
    assert origins(["1.json", "2.json"], alike) == f"`1.json`, `2.json`: 3 s on H200, torch 2.11.0, commit {'a' * 12}."
    folded = origins(["1.json", "2.json", "3.json"], [*alike, alike[0]])
    assert folded.startswith(
        "<details><summary>3 result files: 4 s on H200, torch 2.11.0</summary>\n<code>1.json</code>"
    )
    assert folded.count(f"({'a' * 12})") == 3
    assert folded.endswith("\n</details>")


def drawing(text):
    """An SVG's numbers, and all else but ids, which are hashes of the numbers."""
    text = re.sub(r'(\bid="|url\(#|href="#)[^")]*', r"\1", text)
    number = re.compile(r"(?<![#\w])-?\d+\.?\d*(?:e-?\d+)?")
    return number.sub("", text), [float(found) for found in number.findall(text)]


@pytest.mark.parametrize("figure", [name for name in pages.FIGURES if name.endswith(".svg")])
def test_a_committed_drawing_is_that_of_its_files(figure, tmp_path):
    committed = (ROOT / figure).read_text()
    version = re.search(r"Matplotlib v([^,]+),", committed)[1]
    if version != matplotlib.__version__:
        pytest.skip(f"the committed figure was drawn by matplotlib {version}, this is {matplotlib.__version__}")
    files, draw = pages.FIGURES[figure]
    save_figure(draw([Result.load(ROOT / file) for file in files]), tmp_path / "figure.svg")
    (shape, numbers), (shape_now, numbers_now) = (
        drawing(text) for text in (committed, (tmp_path / "figure.svg").read_text())
    )
    assert shape == shape_now, f"run python -m horst.lab.report.pages: {figure} is out of date"
    assert numbers == pytest.approx(numbers_now, abs=0.01)  # points, of which an inch has 72


@pytest.mark.parametrize("figure", pages.FIGURES)
def test_every_figure_is_on_a_page_with_words_for_those_who_do_not_see_it(figure):
    texts = [(ROOT / page).read_text() for page in pages.PAGES]
    words = [
        found for text in texts for found in re.findall(rf"!\[([^\]]*)\]\([^)]*{pathlib.Path(figure).name}\)", text)
    ]
    assert words, f"no page shows {figure}"
    assert all(len(found) > 20 for found in words)


def test_a_page_that_asks_for_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match=r"the table 'nothing'\. Known tables: \['x'\]"):
        rewrite_blocks("<!-- table:nothing -->\n<!-- /table -->", {"x": lambda: ""})
