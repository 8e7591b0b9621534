"""The pages' tables come from the committed result files, and are up to date."""

import pathlib

import pytest

from horst.experiments.result import Result
from horst.report import pages
from horst.report.tables import rewrite_blocks

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_tables_of_the_page_are_those_of_the_result_files(page):
    text = (ROOT / page).read_text()
    assert pages.rewrite_page(text, ROOT) == text, f"run python -m horst.report.pages: {page} is out of date"


@pytest.mark.parametrize("name", pages.TABLES)
def test_every_table_is_on_a_page_and_its_files_say_where_they_come_from(name):
    assert any(f"<!-- table:{name} -->" in (ROOT / page).read_text() for page in pages.PAGES)
    for file in pages.TABLES[name][0]:
        environment = Result.load(ROOT / file).environment
        assert {"commit", "torch", "python", "device"} <= set(environment)


def test_a_page_that_asks_for_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match=r"the table 'nothing'\. Known tables: \['x'\]"):
        rewrite_blocks("<!-- table:nothing -->\n<!-- /table -->", {"x": lambda: ""})
