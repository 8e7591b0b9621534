"""Figures and tables of the geometry lab are made from result files."""

import dataclasses
import math

import pytest

from horst.lab.experiments import theorem4_7_implicit_bias
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.report import geometry
from horst.lab.report.figures import FIGURES

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


def test_tables_show_what_the_files_hold(folder):
    result = Result.load(folder / "toy_suite.json")
    table = geometry.summary_table(result)
    assert len(table.rows) == len(result.rows)
    sgd = next(row for row in result.rows if row["method"] == "sgd")
    assert f"{sgd['off_support']:.4f} ± {sgd['off_support_std']:.4f}" in table.column("off-support magnitude")


@pytest.mark.parametrize("name", geometry.TABLES)
def test_every_table_has_as_many_cells_as_columns(folder, name):
    file, write = geometry.TABLES[name]
    table = write(Result.load(folder / f"{file}.json"))
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.columns)}
