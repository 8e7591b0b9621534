"""The report: what a page holds and what it refuses, that nothing in a file becomes markup, that a browser shows it."""

import json
import pathlib
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horst.lab.experiments.result import Result, environment
from horst.lab.report import html, paper
from horst.lab.report.sections import KINDS
from horst.lab.report.sparsify import words
from horst.lab.report.tables import Table
from horst.lab.report.transformer_figures import phases_and_overlap, quality_against_sparsity

ROOT = pathlib.Path(__file__).parents[3]
COMMITTED = [*sorted((ROOT / "results").rglob("*.json")), *sorted((ROOT / "benchmarks/results").glob("*.json"))]
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
HISTOGRAM = {"edges": [-1.0, 0.0, 1.0], "density": [0.5, 0.5], "kurtosis": 3.0, "weights": 4}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


class Page(HTMLParser):
    """A page taken apart: its elements in order, each with attributes, parents and text. Tags must balance."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "parents": [e["tag"] for e in self._open], "text": ""}
        self.elements.append(element)
        if tag not in ("meta", "img"):  # which have no end
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, kind=None):
        return [e for e in self.elements if e["tag"] == tag and kind in (None, e["attrs"].get("class"))]

    def texts(self, tag, kind=None):
        return [element["text"] for element in self.all(tag, kind)]


def result(experiment="mine", **changes):
    fields = {
        "experiment": experiment,
        "config": {},
        "rows": [],
        "curves": {},
        "notes": [],
        "environment": environment(),
        "seconds": 1.0,
    }
    return Result(**{**fields, **changes})


def one_shot(seeds=(0,), steps=10, behind_at=None):
    """What Table 6 writes; HORST is one better at each level but ``behind_at``."""
    rows = [
        {
            "optimizer": name,
            "alpha": alpha,
            "beta": 0.0,
            "seed": seed,
            "method": "magnitude" if level else "dense",
            "sparsity": level,
            "sparsity_of_all_weights": level / 2,
            "perplexity": 20.0 + 100 * level + seed - (gain if level != behind_at else -gain),
        }
        for seed in seeds
        for name, alpha, gain in (("adamw", 0.0, 0.0), ("horst", 5.0, 1.0))
        for level in (0.0, 0.5, 0.7)
    ]
    training = [{**row, "tokens_per_second": 1e3, "seconds": 2.0} for row in rows if not row["sparsity"]]
    config = {"run": {"steps": steps, "optimization": {"lr": 1e-3}}, "seeds": list(seeds), "setting": "toys"}
    curves = {"training": training, "histograms": {"adamw": HISTOGRAM, "horst": HISTOGRAM}}
    return result("table6_gpt2_one_shot", config=config, rows=rows, curves=curves, notes=["Ours is smaller."])


def acdc(experiment="table1_deit_acdc", sparsities=(0.7, 0.9), width=32, names=("adamw", "horst"), phases=False):
    """What Tables 1, 3 and 4 write, with two seeds."""
    alphas = {"adamw": 0.0, "ham": 200.0, "horst": 5.0}
    rows = [
        {
            "optimizer": name,
            "alpha": alphas[name],
            "beta": 0.0,
            "lr": 5e-3,
            "sparsity": level,
            "seed": seed,
            "top1": 0.8 - level / 10 + seed / 100,
            "images_per_second": None,
            "seconds": 1.0,
        }
        for level in sparsities
        for name in names
        for seed in (0, 1)
    ]
    config = {"run": {"model": {"width": width}, "optimization": {}}, "setting": "toys"}
    histograms = {str(level): dict.fromkeys(names, HISTOGRAM) for level in sparsities}
    curves = {"histograms": histograms} | ({"phases": [phases_of(row) for row in rows]} if phases else {})
    return result(experiment, config=config, rows=rows, curves=curves)


def phases_of(row):
    """Two sparse phases of ten epochs, with an accuracy at the end alone."""
    records = [(2.0, "sparse", None, None), (4.0, "dense", None, None), (6.0, "sparse", 0.75 + row["seed"] / 10, 0.02)]
    return {
        **row,
        "records": [
            {"epoch": e, "phase": p, "sparsity": row["sparsity"] * (p == "sparse"), "overlap": o, "sign_flips": f}
            for e, p, o, f in records
        ],
        "accuracy": [{"epoch": 10.0, "top1": row["top1"]}],
    }


def quickstart(done=6):
    """What the quickstart writes when AdamW is ahead; vision is missing unless all six runs are done."""

    def row(part, name, **more):
        return {"part": part, "optimizer": name, "alpha": 5.0 * (name == "horst"), "beta": 0.0, "seed": 0, **more}

    levels = [("adamw", 0.0, 9.0), ("adamw", 0.9, 30.0), ("horst", 0.0, 9.0), ("horst", 0.9, 33.0)]
    rows = [row("language", name, sparsity=level, perplexity=value) for name, level, value in levels]
    if done == 6:
        rows += [row("vision", name, sparsity=0.9, lr=5e-3, top1=v) for name, v in (("adamw", 0.9), ("horst", 0.85))]
    histograms = {"language": {"adamw": HISTOGRAM, "horst": HISTOGRAM}, "vision": {}}
    return result("quickstart", rows=rows, curves={"histograms": histograms, "runs": {"done": done, "planned": 6}})


def made_sparse(stages=1, trained=22.0, unit="tokens"):
    """What ``horst sparsify`` writes: 20 dense, 30 pruned, 22 trained in each stage."""
    rows = [{"stage": "dense", "sparsity": 0.0, "steps": 0, "units": 0, "perplexity": 20.0}]
    for level in [0.25, 0.5][-stages:]:
        rows.append({"stage": "pruned", "sparsity": level, "steps": 0, "units": 0, "perplexity": 30.0})
        rows.append({"stage": "trained", "sparsity": level, "steps": 8, "units": 640, "perplexity": trained})
    rows[-1]["sparsity_of_pruned_layers"] = 0.5
    curves = {
        "metric": "perplexity",
        "higher_is_better": False,
        "unit": unit,
        "layers": [{"layer": "h.0.weight", "shape": [4, 8], "sparsity": 0.5}],
        "training": [[{"step": 4, "loss": 1.0}, {"step": 8, "eval_perplexity": 22.0}]] * stages,
    }
    return result("sparsify", rows=rows, curves=curves, config={"setting": "a toy"})


def test_a_model_made_sparse_has_its_stages_layers_and_a_sentence(tmp_path):
    page = built(tmp_path, made_sparse())
    sentence = "Perplexity 20 dense, 22 with 50 % zeros; 30 before training, so 80 % of the loss is won back."
    assert sentence in " ".join(page.texts("p"))
    cells = [*page.texts("td"), *page.texts("th")]
    assert {"dense", "50% zeros, pruned", "50% zeros, trained", "640", "h.0.weight", "4 x 8", "50.0%"} <= set(cells)
    (tmp_path / "two").mkdir()
    two = built(tmp_path / "two", made_sparse(stages=2))
    assert "Perplexity 20 dense, 22 with 50 % zeros." in " ".join(
        two.texts("p")
    )  # no share of what one shot would lose


@pytest.mark.parametrize(("unit", "data"), [("tokens", "this text"), ("rows", "this text"), ("images", "these images")])
def test_a_model_no_worse_than_dense_is_not_taken_for_better(unit, data):
    found = words(made_sparse(trained=19.0, unit=unit))
    assert found.startswith("Perplexity 20 dense, 19 with 50 % zeros: no worse than dense, ")
    assert found.endswith(f" but only the sparse model was trained further on {data}.")


@pytest.mark.parametrize("trained", [19.0, 22.0])
@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"judged_on": 128}, "Judged on 128 tokens: fewer than 10,000 say little about other text."),
        ({"judged_on": 20_000, "passes": 14.5}, "The training text is read about 14 times"),
    ],
)
def test_little_text_allows_no_verdict(trained, known, said):
    little = made_sparse(trained=trained)
    little.curves.update(known)
    found = words(little)
    assert found.startswith(f"Perplexity 20 dense, {trained:.0f} with 50 % zeros. {said}")
    assert "no worse" not in found
    assert "won back" not in found


def test_enough_text_read_a_few_times_allows_a_verdict():
    enough = made_sparse(trained=19.0)
    enough.curves.update(judged_on=10_000, passes=3.0)
    assert "no worse than dense" in words(enough)


def every_form():
    """What horst export --report writes, of three forms."""
    names = ("form", "title", "file_bytes", "file_ratio", "memory_bytes", "memory_ratio", "inputs_per_s", "speedup")
    names += ("tokens_per_s", "generation_speedup", "perplexity", "max_error")
    sparse = ("sparse-linear", "sparse layers", None, None, 3_000_000, 0.3, 800.0, 2.0, 60.0, 3.0, 20.5, 1e-6)
    file = ("sparse-safetensors", "sparse file", 2_000_000, 0.2, 10_000_000, 1.0, None, None, None, None, 20.0, None)
    dense = ("dense", "dense, as it is", 10_000_000, 1.0, 10_000_000, 1.0, 400.0, 1.0, 20.0, 1.0, 20.0, 0.0)
    rows = [dict(zip(names, values, strict=True)) for values in (sparse, file, dense)]
    return result("export", rows=rows, curves={"unit": "tokens", "metrics": ["perplexity"]})


def test_every_form_of_a_model_stands_beside_dense(tmp_path):
    page = built(tmp_path, every_form())
    text = " ".join(page.texts("p"))
    assert "Fastest: sparse layers, 3.00 times dense; perplexity 20.5, dense 20." in text
    assert "Smallest file: sparse file, 0.200 of dense; perplexity 20, dense 20." in text
    cells = [*page.texts("td"), *page.texts("th")]
    assert {"sparse layers", "sparse-linear", "60.0", "3.00", "0.200", "n/a", "10.0", "new tokens per s"} <= set(cells)


def built(folder, *results, **options):
    """The page made of these results, taken apart."""
    files = [given.save(folder / f"result{i}.json") for i, given in enumerate(results)]
    return Page(html.build(files, folder / "report.html", **options).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory, studies, compared_language, compared_vision):
    """One page with all committed results and a toy of every kind that has none."""
    folder = tmp_path_factory.mktemp("everything")
    toys = [
        acdc(phases=True),
        acdc("table3_ham", (0.9,), names=("adamw", "ham", "horst")),
        acdc("table4_long_run", (0.7,)),
        made_sparse(),
        every_form(),
        *studies.values(),
        compared_language,
        compared_vision,
    ]
    files = [toy.save(folder / f"{toy.experiment}.json") for toy in (*toys, result(rows=[{"a": 1}]), quickstart(2))]
    return html.build([*COMMITTED, *files], folder / "report.html")


@pytest.fixture(scope="module")
def page(everything):
    return Page(everything.read_text(encoding="utf-8"))


def test_every_kind_has_its_place_in_the_page_and_in_the_contents(page):
    sections = [element["attrs"]["id"] for element in page.all("section")]
    links = [e["attrs"]["href"] for e in page.all("a") if "nav" in e["parents"]]
    assert links == [f"#{name}" for name in sections]
    titles = page.texts("h2")
    for kind in KINDS.values():
        assert any(title.startswith(kind.title) for title in titles), f"{kind.title} is not in the page"
    assert "mine" in titles
    assert len(page.all("h1")) == 1
    assert page.all("html")[0]["attrs"]["lang"] == "en"


def test_ids_are_unique_and_every_reference_leads_to_one(page):
    ids = [e["attrs"]["id"] for e in page.elements if "id" in e["attrs"]]
    assert len(ids) == len(set(ids))
    targets = set()
    for element in page.elements:
        for key, value in element["attrs"].items():
            targets |= set(re.findall(r"url\(#([^)]*)\)", value or ""))
            if key == "href":
                assert value.startswith("#"), f"{element['tag']} leads out of the page: {value}"
                targets.add(value[1:])
            if key == "aria-labelledby":
                targets |= set(value.split())
    assert len(targets) > 100
    assert targets <= set(ids)


def test_the_page_needs_no_network_and_no_script(everything, page):
    text = everything.read_text(encoding="utf-8")
    assert {"script", "link", "iframe", "object"}.isdisjoint(e["tag"] for e in page.elements)
    assert [key for e in page.elements for key in e["attrs"] if key.startswith("on")] == []
    sources = [e["attrs"]["src"] for e in page.elements if "src" in e["attrs"]]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert re.findall(r"https?://|url\((?!#)", text) == []
    assert "default-src 'none'" in text


def test_figures_have_captions_and_alternatives_and_wide_things_scroll_in_their_boxes(page):
    drawings, tables = page.all("img"), page.all("table")
    assert len(drawings) >= 15
    assert all(len(e["attrs"]["alt"]) > 30 for e in drawings)
    captions = page.all("figcaption")
    assert len(captions) == len(page.all("figure")) == len(drawings) + len(tables)
    assert all(caption["text"].strip() for caption in captions)
    assert len(page.all("div", "scroll")) == len(drawings) + len(tables)
    assert all(element["parents"][-2:] == ["figure", "div"] for element in [*drawings, *tables])


def test_table_6_has_ours_the_papers_the_setting_the_notes_and_the_environment(tmp_path):
    page = built(tmp_path, one_shot())
    cells = page.texts("td")
    assert {"20.00", "19.00", "70.00", "69.00"} <= set(cells)
    for level in (0.0, 0.5):
        assert f"{paper.TABLE6['horst'][level]:.2f}" in cells
    assert [line.count("%") for line in page.texts("tr", "paper")] == [0, 0, 2]  # AdamW's, HORST's, their difference
    assert "-70.7%" in page.texts("tr", "paper")[2]
    assert "Setting: toys." in page.texts("p")
    assert "Pruned by magnitude, HORST's mean perplexity is below AdamW's dense, at 50%, at 70%." in page.texts("p")
    assert "Ours is smaller." in page.texts("li")
    (origin,) = page.texts("p", "origin")
    assert all(str(value)[:12] in origin for value in environment().values())


def test_the_summary_says_where_horst_is_behind(tmp_path):
    text = built(tmp_path, one_shot(behind_at=0.5)).texts("main")[0]
    assert "HORST's mean perplexity is below AdamW's dense, at 70% and not below it at 50%." in text


@pytest.mark.parametrize(
    ("experiment", "level", "theirs"),
    [("table1_deit_acdc", 0.9, "69.41 ± 2.75"), ("table3_ham", 0.9, "60.06"), ("table4_long_run", 0.7, "78.96")],
)
def test_vision_tables_have_the_papers_accuracies(tmp_path, experiment, level, theirs):
    names = ("adamw", "ham", "horst") if experiment == "table3_ham" else ("adamw", "horst")
    cells = built(tmp_path, acdc(experiment, (level,), names=names)).texts("td")
    assert theirs in cells
    assert f"{100 * (0.8 - level / 10) + 0.5:.2f} ± 0.71" in cells


def test_horst_with_a_beta_of_its_own_at_some_sparsities_is_one_contender(tmp_path):
    given = acdc(sparsities=(0.7, 0.8, 0.9))
    for row in given.rows:
        if row["optimizer"] == "horst":  # the paper's betas for DeiT-small, and a point ahead
            row.update(beta=0.01 * (row["sparsity"] > 0.7), top1=row["top1"] + 0.01)
    page = built(tmp_path, given)
    said = "+1.00 at 70% (learning rate 0.005); +1.00 at 80% (learning rate 0.005); +1.00 at 90% (learning rate 0.005)"
    assert f"HORST's accuracy less AdamW's, in points: {said}." in page.texts("main")[0]
    (words,) = [e["attrs"]["alt"] for e in page.all("img") if "against sparsity" in e["attrs"]["alt"]]
    assert words.endswith("HORST, alpha 5, beta 0 and 0.01: 74.50 at 70%, 72.50 at 90%.")
    shares = [dict(row, accuracy=row["top1"]) for row in given.rows]
    (axes,) = quality_against_sparsity(shares, "accuracy").axes
    assert [(line.get_linestyle(), list(line.get_xdata())) for line in axes.lines] == [("-", [70, 80, 90])] * 2
    both = [*shares, *({**row, "beta": 0.0} for row in shares if row["beta"])]  # now 80 and 90 % have two
    labels = quality_against_sparsity(both, "accuracy").axes[0].get_legend_handles_labels()[1]
    assert labels == ["AdamW", "HORST, alpha 5", "HORST, alpha 5, beta 0.01"]


def test_phases_are_shown_where_a_file_has_them(tmp_path):
    def drawings(**options):
        images = built(tmp_path, acdc(**options)).all("img")
        return [e["attrs"]["alt"] for e in images if e["attrs"]["alt"].startswith("Charts over the epochs")]

    assert drawings() == []
    with_phases = drawings(phases=True)
    assert len(with_phases) == 2  # a sparsity each
    assert "HORST, alpha 5: 80% in the second sparse phase, 80% in the last." in with_phases[0]
    text = built(tmp_path, acdc(phases=True)).texts("main")[0]
    assert "The phases of AC/DC to 90% sparsity" in text
    assert "at most 2.0% had changed sign" in text


def test_phases_of_two_rates_are_not_taken_for_seeds():
    runs = [phases_of(row) for row in acdc(sparsities=(0.9,)).rows]
    both = [*runs, *({**run, "lr": 1e-3} for run in runs)]
    labels = [text.get_text() for text in phases_and_overlap(both).axes[1].get_legend().get_texts()]
    assert labels == [f"{name}, lr {lr}" for lr in ("0.005", "0.001") for name in ("AdamW", "HORST, alpha 5")]


def test_a_model_of_the_width_of_deit_base_is_set_beside_it(tmp_path):
    assert "76.83 ± 0.92" in built(tmp_path, acdc(width=768)).texts("td")


def test_seeds_in_two_files_share_a_table(tmp_path):
    page = built(tmp_path, one_shot(seeds=(0,)), one_shot(seeds=(1,)))
    assert "20.50 ± 0.71" in page.texts("td")
    assert len(page.all("section")) == 1


def test_a_run_that_is_there_twice_does_not_pass_for_another_seed(tmp_path):
    page = built(tmp_path, one_shot(), one_shot())
    titles = [title for title in page.texts("h2") if title.startswith("Table 6")]
    assert titles == ["Table 6: GPT-2, pruned in one shot", "Table 6: GPT-2, pruned in one shot (result1)"]
    assert [cell for cell in page.texts("td") if "±" in cell] == []


def test_other_settings_get_a_section_of_their_own(tmp_path):
    assert len(built(tmp_path, one_shot(), one_shot(seeds=(1,), steps=99)).all("section")) == 2
    first, other = one_shot(), one_shot(seeds=(1,))
    for result, beta2 in ((first, 0.95), (other, 0.999)):  # a figure would take one for a seed of the other
        result.config["run"]["optimization"] = {"betas": [0.9, beta2], "alpha": 5.0}
    assert len(built(tmp_path, first, other).all("section")) == 2
    other.config["run"]["optimization"] = {"betas": [0.9, 0.95], "alpha": 20.0}  # a strength, which rows say
    assert len(built(tmp_path, first, other).all("section")) == 1


def test_the_quickstart_says_where_adamw_is_ahead(tmp_path):
    page = built(tmp_path, quickstart())
    text = page.texts("main")[0]
    pruned = "With 90% of its weights pruned, the GPT's mean perplexity is 30.00 with AdamW and 33.00 with HORST"
    assert f"{pruned}; before pruning, AdamW has 9.00; one seed." in text
    assert {"+10.0%", "-5.0"} <= set(page.texts("td"))
    assert f"{paper.TABLE6['adamw'][0.5]:g}" in text
    assert page.all("p", "partial") == []


def test_the_quickstart_opens_with_one_sentence_and_one_figure(tmp_path):
    page = built(tmp_path, quickstart())
    order = [element["tag"] for element in page.elements if element["tag"] in ("nav", "p", "img", "table")]
    assert order[:3] == ["p", "img", "table"]
    assert page.all("nav") == [] != built(tmp_path, quickstart(), one_shot()).all("nav")


def test_the_quickstart_compares_horst_with_l1_with_adamw_with_l1(tmp_path):
    found = quickstart()
    for row in [row for row in found.rows if row["part"] == "language"]:
        quality = row["perplexity"] * (0.5 if row["optimizer"] == "horst" else 0.75)
        found.rows.append({**row, "optimizer": f"{row['optimizer']}-l1", "l1": 0.1, "perplexity": quality})
    page = built(tmp_path, found)
    said = "16.50 with HORST and l1, 22.50 with AdamW and l1, 30.00 with AdamW and 33.00 with HORST"
    assert said in page.texts("p")[0]
    without, with_l1 = page.texts("tr", "change")[:2]
    assert without == "difference, HORST to AdamW+0.0%+10.0%"
    assert with_l1 == "difference, both with l1-33.3%-26.7%"


def test_a_quickstart_of_which_runs_broke_down_shows_the_others(tmp_path):
    found = quickstart()
    found.rows[:] = [
        {**row, quality: None, "broke_down": "the loss is nan at step 3"} if row["optimizer"] == "adamw" else row
        for row in found.rows
        for quality in ["perplexity" if row["part"] == "language" else "top1"]
    ]
    text = built(tmp_path, found).texts("main")[0]
    assert "broke down" in text
    assert "No language model of both optimizers is done yet." in text


@pytest.mark.parametrize(("gain", "mark", "words"), [(0.01, "*", ", within the spread over seeds"), (0.2, "", "")])
def test_a_difference_within_the_spread_is_called_so(tmp_path, gain, mark, words):
    result = quickstart()
    result.rows[:] = [
        {**row, "seed": seed, "top1": 0.6 + 0.04 * seed + gain * (row["optimizer"] == "horst")}
        for row in result.rows
        if row["part"] == "vision"
        for seed in (0, 1)
    ]
    page = built(tmp_path, result)
    assert f"with 90% zeros: {100 * gain:+.1f} at learning rate 0.005{words}." in page.texts("main")[0]
    assert f"{100 * gain:+.1f}{mark}" in page.texts("td")


def test_a_partial_quickstart_says_so(tmp_path):
    page = built(tmp_path, quickstart(done=2))
    note = "This result is partial: 2 of 6 runs were done when it was interrupted."
    assert page.texts("p", "partial") == [note]


# --- hostile and broken files -----------------------------------------------------------------------------------------

EVIL = "<script>alert(1)</script>\"' onload=x><img src=http://evil onerror=x> | `a` \u2028 & </style></pre>"


def test_nothing_in_a_file_becomes_markup(tmp_path):
    hostile = result(
        EVIL,
        config={"setting": EVIL, EVIL: EVIL},
        rows=[{EVIL: EVIL, "deep": {EVIL: [EVIL]}}],
        notes=[EVIL],
        environment={"commit": EVIL, "torch": EVIL, "device": EVIL, "python": EVIL},
        curves={"runs": {"done": EVIL}},
    )
    page = built(tmp_path, hostile, formats=["markdown"])
    assert {"script", "img"}.isdisjoint(e["tag"] for e in page.elements)
    assert {"onload", "onerror", "src"}.isdisjoint(key for e in page.elements for key in e["attrs"])
    assert EVIL in page.texts("h2")
    assert EVIL.replace("`", "") in page.texts("li")  # between backticks it is set as code
    assert " ".join(EVIL.split()) in page.texts("th")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img" not in text


@settings(max_examples=50)
@given(title=TEXT, value=TEXT, setting=TEXT)
def test_any_text_comes_out_as_it_went_in(tmp_path_factory, title, value, setting):
    given_result = result(title, config={"setting": setting}, rows=[{"first": "x", "second": value}])
    page = built(tmp_path_factory.mktemp("text"), given_result)
    assert page.texts("td")[0] == " ".join(value.split())
    assert json.loads(page.texts("pre")[0]) == {"setting": setting}
    assert [e["tag"] for e in page.elements if "h2" in e["parents"] or "td" in e["parents"]] == []


@given(table=st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(TEXT, min_size=n, max_size=n), min_size=1)))
def test_a_cell_of_a_markdown_table_stays_in_its_place(table):
    lines = Table(columns=table[0], rows=table[1:]).markdown().split("\n")
    del lines[1]
    found = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert found == [[" ".join(cell.split()) for cell in line] for line in table]


def test_a_half_written_file_is_named(tmp_path):
    whole = one_shot().save(tmp_path / "whole.json").read_bytes()
    cut = tmp_path / "cut.json"
    for length in range(0, len(whole) - 2, 199):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.json is no whole result file: .*run its experiment again"):
            html.build([cut], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "not an object"),
        ({"rows": 3}, "lacks rows"),
        ({"rows": [1]}, "rows must be objects"),
        ({"notes": [{}]}, "notes texts"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
        ({"schema_version": 99}, "schema version 99"),
        ({"experiment": "table6_gpt2_one_shot", "rows": [{}]}, "cannot be shown as 'table6_gpt2_one_shot': KeyError"),
        ({"experiment": "toy_suite", "rows": [{"label": 1}]}, "cannot be shown as 'toy_suite'"),
        ({"environment": {}}, "KeyError: 'commit'"),
    ],
)
def test_a_foreign_file_is_named(tmp_path, content, message):
    path = tmp_path / "foreign.json"
    whole = json.loads(result().save(path).read_text())
    path.write_text(json.dumps({**whole, **content} if content else content))
    with pytest.raises(ValueError, match=rf"foreign\.json.*{message}"):
        html.build([path], tmp_path / "report.html")


def test_a_config_that_is_no_config_is_named(tmp_path):
    good, odd = one_shot(), one_shot(seeds=(1,))
    odd.config["run"] = 3
    with pytest.raises(ValueError, match=r"result1\.json cannot be shown as 'table6_gpt2_one_shot': AttributeError"):
        built(tmp_path, good, odd)


def test_a_figure_that_cannot_be_drawn_is_named(tmp_path):
    profiles = {name: {"label": "$\\frac{$", "mean": [1.0], "std": [0.0]} for name in ("adam_exp", "exp_adam")}
    broken = result("figure3_composition_order", curves={"support": 1, "profiles": profiles})
    with pytest.raises(ValueError, match=r"result0\.json cannot be shown as 'figure3_composition_order'"):
        built(tmp_path, broken)


@pytest.mark.parametrize(
    ("content", "message"), [(b'"\xff"', "utf"), (b"[" * 100_000, "recursion"), (b'{"a": NaN', "delimiter")]
)
def test_what_is_no_json_is_named(tmp_path, content, message):
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"odd\.json is no whole result file: .*{message}"):
        html.build([tmp_path / "odd.json"], tmp_path / "report.html")


def test_missing_files_and_unknown_formats(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nothing\.json"):
        html.build([tmp_path / "nothing.json"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="holds no result file"):
        html.build([tmp_path], tmp_path / "report.html")
    with pytest.raises(ValueError, match="name result files"):
        html.build([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="formats must be among png, svg, markdown, got 'pdf'"):
        html.build([result().save(tmp_path / "a.json")], tmp_path / "report.html", formats=["pdf"])


def test_an_error_leaves_the_old_page(tmp_path):
    page = html.build([result().save(tmp_path / "a.json")], tmp_path / "report.html")
    before = page.read_text()
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json"):
        html.build([tmp_path / "a.json"], page)
    assert page.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "report.html"]


# --- other formats ----------------------------------------------------------------------------------------------------


def test_figures_and_markdown_beside_the_page(tmp_path):
    built(tmp_path, one_shot(), quickstart(), formats=["png", "svg", "markdown"])
    figures = tmp_path / "report_figures"
    names = {path.stem for path in figures.glob("*.png")}
    assert len(names) == 4
    assert names == {path.stem for path in figures.glob("*.svg")}
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert set(re.findall(r"!\[.+?\]\(report_figures/(.+?)\.png\)", text)) == names
    assert "| HORST, alpha 5 | 1 | 19.00 | 69.00 | 89.00 |" in text
    assert f"| *the paper's* |  | *{paper.TABLE6['horst'][0.0]:.2f}* |" in text
    assert f"python {environment()['python']}" in text


def test_the_same_files_give_the_same_page(tmp_path):
    first = html.build([one_shot().save(tmp_path / "a.json")], tmp_path / "1.html").read_bytes()
    assert html.build([tmp_path], tmp_path / "2.html").read_bytes() == first


# --- in a browser -----------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(not BROWSER, reason="needs chromium, which this machine does not have")


def browse(folder, *options):
    """Run the browser; what it says."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr"
    )
    command = [BROWSER, *flags.split(), f"--user-data-dir={folder / 'profile'}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@needs_browser
@pytest.mark.parametrize(("scheme", "ground"), [(1, "#ffffff"), (0, "#15171c")], ids=["light", "dark"])
def test_a_browser_shows_it_without_complaint(everything, tmp_path, scheme, ground):
    shot = tmp_path / "shot.png"
    said = browse(
        tmp_path,
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1000,1200",
        f"--screenshot={shot}",
        everything.as_uri(),
    )
    assert "CONSOLE" not in said.stderr
    corner = pytest.importorskip("matplotlib.image").imread(shot)[2, 2, :3]
    assert "#" + "".join(f"{round(255 * float(channel)):02x}" for channel in corner) == ground


@needs_browser
def test_nothing_sticks_out_on_a_phone(everything, tmp_path):
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<iframe id="page" src="{everything.as_uri()}" style="width: 390px; height: 800px; border: 0"></iframe>
        <script>onload = () => {{
            const root = document.getElementById("page").contentDocument.documentElement
            const scrolling = [...root.querySelectorAll(".scroll")].some(box => box.scrollWidth > box.clientWidth)
            document.title = `${{root.clientWidth}} ${{root.scrollWidth}} ${{scrolling}}`
        }}</script>"""
    )
    options = ("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom")
    said = browse(tmp_path, *options, frame.as_uri())
    assert "<title>390 390 true</title>" in said.stdout
