"""Figures and tables are drawn from result files, and the committed page agrees with the committed results."""

import math
import pathlib

import pytest

from horst.lab.experiments import (
    figure1_diagonal_network,
    figure2_dichotomy,
    figure3_composition_order,
    figure5_additive_vs_multiplicative,
    figure6_mirror_maps,
    figure7_loss_curves,
    theorem4_7_implicit_bias,
    toy_ablation,
    toy_suite,
)
from horst.lab.experiments.result import Result
from horst.lab.report import geometry
from horst.lab.report.figures import FIGURES

ROOT = pathlib.Path(__file__).parents[3]
TINY = {"steps": 20, "seeds": (0, 1), "n_samples": 6, "n_features": 10, "snapshots": 5}
MODULES = (
    figure1_diagonal_network,
    figure2_dichotomy,
    figure3_composition_order,
    figure5_additive_vs_multiplicative,
    figure6_mirror_maps,
    figure7_loss_curves,
    toy_ablation,
    toy_suite,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Result files of tiny runs, as they come back from disk."""
    path = tmp_path_factory.mktemp("results")
    for module in MODULES:
        result = module.run(module.Config(**TINY))
        result.save(path / f"{result.experiment}.json")
    small = theorem4_7_implicit_bias.Config(
        n_samples=5, n_features=8, seeds=(0,), log_norm_end=5.0, p_values=(2.0, math.inf), other_smoothings=(1e-2,)
    )
    flow = theorem4_7_implicit_bias.run(small)
    for name in ("theorem4_7_implicit_bias", "theorem4_7_small"):
        flow.save(path / f"{name}.json")
    return path


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_labels_its_axes(folder, name):
    figure = FIGURES[name](Result.load(folder / f"{name}.json"))
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert panels
    assert all(axes.get_xlabel() for axes in panels)
    assert panels[0].get_ylabel()
    assert all(axes.lines or axes.images for axes in panels)


def test_the_page_is_rewritten_between_its_markers_and_nowhere_else(folder):
    results = {path.stem: Result.load(path) for path in folder.glob("*.json")}
    blocks = "\n\n".join(f"before {name}\n<!-- table:{name} -->\nold\n<!-- /table -->" for name in geometry.TABLES)
    page = geometry.rewrite_page(f"{blocks}\nthe end", results)
    assert "old" not in page
    assert page.endswith("the end")
    for name in geometry.TABLES:
        assert f"before {name}\n<!-- table:{name} -->\n|" in page
    assert geometry.rewrite_page(page, results) == page


def test_tables_show_what_the_files_hold(folder):
    result = Result.load(folder / "toy_suite.json")
    table = geometry.summary_table(result)
    assert len(table.splitlines()) == len(result.rows) + 2
    sgd = next(row for row in result.rows if row["method"] == "sgd")
    assert f"{sgd['off_support']:.4f} ± {sgd['off_support_std']:.4f}" in table


def test_a_page_that_asks_for_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="asks for the table 'nothing'"):
        geometry.rewrite_page("<!-- table:nothing --><!-- /table -->", {})
    with pytest.raises(ValueError, match=r"needs the result file toy_suite.json"):
        geometry.rewrite_page("<!-- table:summary --><!-- /table -->", {})


def test_build_writes_figures_and_page(folder, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table:summary --><!-- /table -->")
    written = geometry.build(geometry.Config(results=folder, page=page, figures=tmp_path / "figures"))
    assert page in written
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == set(FIGURES)
    assert "| SGD |" in page.read_text()


def test_the_committed_page_was_generated_from_the_committed_results():
    page, results = ROOT / "docs/geometry.md", ROOT / "results/geometry"
    loaded = {path.stem: Result.load(path) for path in results.glob("*.json")}
    assert set(loaded) >= {file for file, _ in geometry.TABLES.values()}
    text = page.read_text()
    assert geometry.rewrite_page(text, loaded) == text
    for name in geometry.TABLES:
        assert f"<!-- table:{name} -->" in text
