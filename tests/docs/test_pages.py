"""The pages' tables and figures come from the committed result files, and are up to date."""

import dataclasses
import pathlib
import re

import gpt2_tables
import matplotlib
import page_tables
import pages
import pytest
import recovery_tables

from horst.lab.experiments.result import Result

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = "run python docs/build_tools/pages.py"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages.pages(ROOT)}
WIKIPEDIA = Result.load(ROOT / page_tables.TABLE6[0])


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_the_page_are_those_of_the_result_files(page):
    assert pages.rewrite(PAGES[page], root=ROOT) == PAGES[page], f"{COMMAND}: {page} is out of date"


@pytest.mark.parametrize("name", page_tables.TABLES)
def test_every_table_is_on_a_page_and_its_files_say_where_they_come_from(name):
    assert any(f"<!-- table:{name} -->" in text for text in PAGES.values())
    for file in pages.expand(page_tables.TABLES[name][0], ROOT):
        environment = Result.load(ROOT / file).environment
        assert {"commit", "torch", "python", "device"} <= set(environment)


def test_every_page_with_a_marker_is_found(tmp_path):
    (tmp_path / "docs/studies").mkdir(parents=True)
    (tmp_path / "README.md").write_text("no table")
    new = tmp_path / "docs/studies/new.md"
    new.write_text("above\n<!-- table:paper_acdc -->\nold\n<!-- /table -->\nbelow")
    assert pages.pages(tmp_path) == [new]
    before = new.read_text()
    assert pages.main(["--check", "--root", str(tmp_path)]) == 1
    assert new.read_text() == before, "--check writes nothing"
    text = pages.rewrite(before, root=tmp_path)
    assert text.startswith("above\n<!-- table:paper_acdc -->\n| the paper,")
    assert "| HORST | 78.42 ± 0.39 |" in text
    assert text.endswith("<!-- /table -->\nbelow")
    new.write_text(text)
    assert pages.main(["--check", "--root", str(tmp_path)]) == 0


def test_a_pattern_stands_for_the_files_that_match_and_a_name_must_be_there(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").touch()
    assert pages.expand(["b.json", "*.json", "none/*.json"], tmp_path) == ["b.json", "a.json"]
    with pytest.raises(FileNotFoundError, match=r"there is no result file .*c\.json"):
        pages.expand(["c.json"], tmp_path)


def with_rows(result, rows, **optimization):
    run = result.config["run"]
    config = {**result.config, "run": {**run, "optimization": {**run["optimization"], **optimization}}}
    return dataclasses.replace(result, config=config, rows=rows)


def test_the_table_of_gpt2_averages_files_of_equal_settings_and_says_seeds_and_zeros():
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "horst" and row["sparsity"] in (0.0, 0.5, 0.7)]
    again = [{**row, "seed": 1, "perplexity": row["perplexity"] + 2} for row in own]
    sparse = [
        {**row, "optimizer": "horst-l1", "l1": 0.01, "sparsity_of_pruned_layers": max(0.42, row["sparsity"])}
        for row in own
    ]
    solved = [{**row, "method": "sparsegpt" if row["sparsity"] else "dense"} for row in sparse]
    table = gpt2_tables.compare_gpt2([*(with_rows(WIKIPEDIA, rows) for rows in (own, again, sparse, solved))])
    assert table.columns[0] == "perplexity; lr 0.001, beta2 0.95, decay 0.1, decay on matrices"
    assert list(table.columns[1:]) == ["pruned by", "seeds", "dense", "50%", "70%"]
    assert [row[0] for row in table.rows] == ["HORST, alpha 5", *["HORST, alpha 5, l1 0.01"] * 2]
    assert table.column("seeds") == ["2", "1", "1"]
    assert table.column("dense")[0] == f"{own[0]['perplexity'] + 1:.2f} ± 1.41"
    assert table.column("dense")[1].endswith("(42% zeros)")
    assert table.column("50%")[1] == f"{own[1]['perplexity']:.2f}"
    other = gpt2_tables.compare_gpt2([with_rows(WIKIPEDIA, own), with_rows(WIKIPEDIA, again, lr=2e-3)])
    assert other.column("seeds") == ["1", "1"], "another learning rate is no other seed"
    assert other.column("lr") == ["0.001", "0.002"]


def test_models_with_l1_are_shown_pruned_globally_and_others_uniformly():
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and row["sparsity"] in (0.0, 0.5)]
    both = [*own, *({**row, "method": "magnitude-global", "perplexity": 1.0} for row in own if row["sparsity"])]
    with_l1 = [{**row, "optimizer": "adamw-l1", "l1": 0.015} for row in both]
    table = gpt2_tables.compare_gpt2([with_rows(WIKIPEDIA, both), with_rows(WIKIPEDIA, with_l1)])
    assert table.column("pruned by") == ["magnitude", "magnitude, global"]
    assert table.column("50%") == [f"{own[1]['perplexity']:.2f}", "1.00"]


def test_the_headline_is_pruned_by_sparsegpt_and_its_dense_column_has_all_seeds():
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and row["sparsity"] in (0.0, 0.5)]
    solved = [{**row, "seed": 1, "method": row["method"].replace("magnitude", "sparsegpt")} for row in own]
    muon = [{**row, "optimizer": "muon"} for row in solved]
    files = [with_rows(WIKIPEDIA, own), with_rows(WIKIPEDIA, solved), with_rows(WIKIPEDIA, muon, muon_lr_ratio=2.0)]
    table = gpt2_tables.gpt2_headline(files)
    assert [row[0] for row in table.rows] == ["AdamW", "Muon, lr 0.002 in the blocks"]
    assert table.column("seeds") == ["1 (dense: 2)", "1"]
    assert table.column("dense")[0] == f"{own[0]['perplexity']:.2f} ± 0.00"
    assert table.column("50%") == [f"{own[1]['perplexity']:.2f}"] * 2


def test_a_run_that_broke_down_has_one_row_that_says_so():
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and row["sparsity"] in (0.0, 0.5)]
    nothing = {"optimizer": "horst-muon-l1", "l1": 0.1, "perplexity": None, "broke_down": "the loss is nan at step 7"}
    broken = with_rows(WIKIPEDIA, [{**row, **nothing} for row in own], muon_lr_ratio=1.0)
    table = gpt2_tables.compare_gpt2([with_rows(WIKIPEDIA, own), broken])
    assert table.rows[-1] == [
        "HORST-Muon, l1 0.1, lr 0.001 in the blocks", "1", "broke down: the loss is nan at step 7", "",
    ]  # fmt: skip


def test_a_short_table_leaves_its_result_files_to_the_study():
    assert "result files" not in pages.block("gpt2_headline", ROOT)
    assert "result files" in pages.block("compare_gpt2", ROOT)


def test_files_of_one_machine_share_a_line_that_names_each_ones_commit():
    def result(commit, device, seconds):
        environment = {"commit": commit, "device": device, "torch": "2.11.0", "python": "3.12"}
        return Result(experiment="x", config={}, rows=[], curves={}, notes=[], environment=environment, seconds=seconds)

    results = [result("a" * 40, "H200", 10.0), result("c" * 40, "x86_64", 7.0), result("b" * 40, "H200", 20.4)]
    assert pages.origins(["1.json", "2.json", "3.json"], results).split("\n\n") == [
        f"`1.json` ({'a' * 12}), `3.json` ({'b' * 12}): 30 s on H200, torch 2.11.0; in brackets the commit.",
        f"`2.json`: 7 s on x86_64, torch 2.11.0, commit {'c' * 12}.",
    ]
    alike = [result("a" * 40, "H200", 1.0), result("a" * 40, "H200", 2.0)]
    assert (
        pages.origins(["1.json", "2.json"], alike)
        == f"`1.json`, `2.json`: 3 s on H200, torch 2.11.0, commit {'a' * 12}."
    )
    folded = pages.origins(["1.json", "2.json", "3.json"], [*alike, alike[0]])
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


@pytest.mark.parametrize("figure", [name for name in page_tables.FIGURES if name.endswith(".svg")])
def test_a_committed_drawing_is_that_of_its_files(figure, tmp_path):
    committed = (ROOT / figure).read_text()
    version = re.search(r"Matplotlib v([^,]+),", committed)[1]
    if version != matplotlib.__version__:
        pytest.skip(f"the committed figure was drawn by matplotlib {version}, this is {matplotlib.__version__}")
    pages.draw(figure, tmp_path / "figure.svg", ROOT)
    (shape, numbers), (shape_now, numbers_now) = (
        drawing(text) for text in (committed, (tmp_path / "figure.svg").read_text())
    )
    assert shape == shape_now, f"{COMMAND}: {figure} is out of date"
    assert numbers == pytest.approx(numbers_now, abs=0.01)  # points, of which an inch has 72


@pytest.mark.parametrize("figure", page_tables.FIGURES)
def test_every_figure_is_on_a_page_with_words_for_those_who_do_not_see_it(figure):
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    words = [
        found for text in texts for found in re.findall(rf"!\[([^\]]*)\]\([^)]*{pathlib.Path(figure).name}\)", text)
    ]
    assert words, f"no page shows {figure}"
    assert all(len(found) > 20 for found in words)


def test_a_page_that_asks_for_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match=r"the table 'nothing'\. Known tables: \['x'\]"):
        pages.rewrite("<!-- table:nothing -->\n<!-- /table -->", {"x": ""})
    assert pages.rewrite("<!-- table:x -->old<!-- /table -->", {"x": "new"}) == "<!-- table:x -->\nnew\n<!-- /table -->"


def test_the_times_of_short_attention_stand_beside_their_floor():
    shape = {"batch": 2, "tokens": 4, "heads": 1, "head_width": 8, "floor_microseconds": 10.0}
    rows = [
        {**shape, "contender": name, "direction": direction, "microseconds": time, "times_floor": time / 10}
        for name, direction, time in (
            ("ours", "forwards", 12.0),
            ("ours", "backwards", 20.0),
            ("theirs", "forwards", 30.0),
            ("theirs", "backwards", 44.0),
        )
    ]
    write = page_tables.benchmark_tables.short_attention_table
    table = write([dataclasses.replace(WIKIPEDIA, rows=rows)])
    assert list(table.columns)[2:] == ["floor, us", "ours", "theirs"]
    assert table.rows == [
        ["2 x 4 x 1 x 8", "forwards", "10", "12 (1.2 x)", "30 (3.0 x)"],
        ["2 x 4 x 1 x 8", "backwards", "10", "20 (2.0 x)", "44 (4.4 x)"],
    ]
    newer = [{**row, "kernel": "attention", "shape": "2 x 4 x 1 x 8"} for row in rows]
    newer.append({**newer[0], "kernel": "cross_entropy", "shape": "8 x 100", "direction": "both"})
    assert write([dataclasses.replace(WIKIPEDIA, rows=newer)]).rows == table.rows


def _result(experiment, rows):
    return Result(experiment=experiment, config={}, rows=rows, curves={}, notes=[], environment={}, seconds=1.0)


def test_recovery_shows_each_contender_with_the_rate_that_the_validation_text_chose():
    common = {"model": "tiny", "seed": 0}
    pruned = [
        {**common, "contender": "one-shot", "pattern": "0", "method": "dense", "test": 20.0},
        {**common, "contender": "one-shot", "pattern": "0.6", "method": "sparsegpt", "test": 60.0},
        {**common, "contender": "one-shot", "pattern": "2:4", "method": "sparsegpt", "test": 30.0},
    ]
    trained = [
        {
            **common,
            "contender": "horst",
            "tokens": 5e6,
            "pattern": pattern,
            "lr": lr,
            "validation": judged,
            "test": test,
        }
        for pattern, lr, judged, test in [("0.6", 1e-4, 9.0, 29.0), ("0.6", 1e-3, 8.0, 30.0), ("2:4", 1e-3, 7.0, 21.0)]
    ]
    broken = {**common, "contender": "horst", "pattern": "0.6", "lr": 1.0, "failed": "the loss is nan"}
    table, tried = recovery_tables.recovery_tables([_result("bench_sparsify", [*pruned, *trained, broken])])
    assert table.columns == ["tiny, perplexity after 5.0 M tokens, one seed", "lr", "2:4", "60%"]
    assert table.rows == [
        ["dense", "", "20.00", "20.00"],
        ["SparseGPT, not trained", "", "30.00", "60.00"],
        ["SparseGPT, then HORST", "0.001", "21.00", "30.00"],
        ["won back by HORST", "", "90%", "75%"],
    ]
    assert tried.rows == [["tiny", "60%", "HORST", "0.0001: 9.00, 0.001: 8.00, 1: broke down"]]
    assert recovery_tables.recovery_tables([]) == ["Not measured yet."]


def test_recovery_of_several_seeds_is_a_mean_with_the_rate_of_each_seed():
    rows = []
    for seed, dense, start, found in (
        (0, 10.0, 20.0, {"adamw": 12.0, "horst": 11.0}),
        (1, 12.0, 22.0, {"adamw": 13.0, "horst": 14.0}),
    ):
        common = {"model": "tiny", "seed": seed, "contender": "one-shot"}
        rows += [
            {**common, "pattern": "0", "method": "dense", "test": dense},
            {**common, "pattern": "0.6", "method": "sparsegpt", "test": start},
        ]
        for way, test in found.items():
            for lr in (1e-3, 3e-3):  # seed 0 chooses the first, seed 1 the second
                judged = abs(lr - (1e-3, 3e-3)[seed]) * 1e3
                own = {"contender": way, "pattern": "0.6", "lr": lr, "tokens": 1e6, "validation": judged}
                rows.append({**common, **own, "test": test + 10 * judged})
    table, tried = recovery_tables.recovery_tables([_result("bench_sparsify", rows)])
    assert table.columns == ["tiny, perplexity after 1.0 M tokens, mean of 2 seeds", "lr", "60%"]
    assert table.rows == [
        ["dense", "", "11.00"],
        ["SparseGPT, not trained", "", "21.00"],
        ["SparseGPT, then AdamW", "0.001, 0.003", "12.50"],
        ["SparseGPT, then HORST", "0.001, 0.003", "12.50"],
        ["won back by AdamW", "", "85%"],
        ["won back by HORST", "", "85%"],
        ["seeds in which HORST is ahead of AdamW", "", "1 of 2"],
    ]
    assert tried.rows[0] == ["tiny", "60%", "AdamW", "0.001: 0.00 and 2.00, 0.003: 2.00 and 0.00"]


def test_sentence_embeddings_are_means_over_seeds_at_the_best_rate():
    base = {"model": "tiny", "method": "sparsegpt", "sparsity_of_pruned_layers": 0.8, "training": "horst"}
    found = [(0, 1e-4, 0.5, 0.9), (1, 1e-4, 0.5, 0.8), (0, 1e-3, 0.7, 0.6), (1, 1e-3, 0.6, 0.7)]
    rows = [dict(base, seed=s, lr=lr, validation=v, test=t) for s, lr, v, t in found]
    rows += [dict(base, training="none", seed=0, lr=None, validation=0.1, test=0.2)]
    table = recovery_tables.sentence_embeddings_table([_result("bench_sentence_embeddings", rows)])
    assert table.column("mean cosine") == ["0.6500", "0.2000"]
    assert table.column("lr") == ["0.001", ""]
