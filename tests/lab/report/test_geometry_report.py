"""Figures and tables of the geometry lab are made from result files."""

import dataclasses
import math

import pytest

from horst.lab.experiments import theorem4_7_implicit_bias
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.report import geometry
from horst.lab.report.sections import KINDS

TINY = {"steps": 20, "seeds": (0, 1), "n_samples": 6, "n_features": 10, "snapshots": 5}
NAMES = ("figure1_right", "figure2", "figure3_right", "figure5", "figure6", "figure7", "toy_ablation", "toy_suite")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Result files of tiny runs, as they come back from disk."""
    path = tmp_path_factory.mktemp("results")
    for name in NAMES:
        result = RECIPES[name].run(dataclasses.replace(RECIPES[name].scales["paper"](), **TINY))
        result.save(path / f"{result.experiment}.json")
    small = theorem4_7_implicit_bias.Config(
        n_samples=5, n_features=8, seeds=(0,), log_norm_end=5.0, p_values=(2.0, math.inf), other_smoothings=(1e-2,)
    )
    theorem4_7_implicit_bias.run(small).save(path / "theorem4_7_implicit_bias.json")
    return path


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.group == "Geometry"])
def test_every_figure_labels_its_axes_and_every_table_has_as_many_cells_as_columns(folder, name):
    content = KINDS[name].write([Result.load(folder / f"{name}.json")])
    assert content.figures or name == "figure2_dichotomy"
    for figure in content.figures:
        panels = [axes for axes in figure.draw().axes if axes.get_label() != "<colorbar>"]
        assert panels
        assert all(axes.get_xlabel() for axes in panels)
        assert panels[0].get_ylabel()
        assert all(axes.lines or axes.images for axes in panels)
    for table in content.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_tables_show_what_the_files_hold(folder):
    result = Result.load(folder / "toy_suite.json")
    table = geometry.summary_table(result)
    assert len(table.rows) == len(result.rows)
    sgd = next(row for row in result.rows if row["method"] == "sgd")
    assert f"{sgd['off_support']:.4f} ± {sgd['off_support_std']:.4f}" in table.column("off-support magnitude")
