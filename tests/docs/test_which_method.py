"""What the studies of GPT-2 small and of methods say in words holds in the result files, seed by seed."""

import itertools
import json
import pathlib
import re

import compare_page
import pytest

from horst.lab.experiments.result import Result
from horst.lab.report import compare
from horst.lab.report.quality_tables import EDGE
from horst.lab.report.tables import Table

ROOT = pathlib.Path(__file__).parents[2]
GPT2_STUDY = " ".join((ROOT / "docs/studies/language_gpt2.md").read_text(encoding="utf-8").split())
PAGE = (ROOT / "docs/studies/method_comparison.md").read_text(encoding="utf-8")
VISION_STUDY = (ROOT / "docs/studies/vision.md").read_text(encoding="utf-8")
RESULTS = ROOT / "results/transformers"
LANGUAGE = {e.name: e for e in compare.entries(Result.load(RESULTS / "compare_language.json"))}
MUON_L1 = {e.name: e for e in compare.entries(Result.load(RESULTS / "compare_muon_l1.json"))}
MUON_L1_LONG = {e.name: e for e in compare.entries(Result.load(RESULTS / "compare_muon_l1_3200_steps.json"))}
VISION = {e.name: e for e in compare.entries(Result.load(RESULTS / "compare_vision.json"))}
PRUNED = [("sparsegpt", level) for level in (0.5, 0.6, 0.7, 0.8, 0.9)]
DENSE, AT_50, AT_60, AT_70, AT_80, AT_90 = compare.DENSE, *PRUNED
SPARSE = ("sparse", 0.9)
MAGNITUDE_60, MAGNITUDE_70, MAGNITUDE_80 = (("magnitude", level) for level in (0.6, 0.7, 0.8))


def ahead(one, other, place, other_place=None, entries=LANGUAGE):
    """In how many of the three seeds one is better than the other."""
    ours, theirs = entries[one].values(place), entries[other].values(other_place or place)
    assert ours.keys() == theirs.keys() == {1, 2, 3}
    sign = 1 if entries[one].measure.less else -1
    return sum(sign * ours[seed] < sign * theirs[seed] for seed in ours)


def words_of(section):
    """The study's text between a heading and the generated block below it."""
    return PAGE.split(f"## {section}\n")[1].split("<!-- table:")[0]


def ahead_of_all(names, place, entries=LANGUAGE, but=()):
    others = [name for name in entries if name not in (*names, *but) and entries[name].values(place)]
    return all(ahead(name, other, place, entries=entries) == 3 for name in names for other in others)


def means_are_on_the_page(section, entries, spec, claims):
    text = words_of(section)
    for place, names in claims.items():
        for name in names:
            assert format(entries[name].mean(place), spec) in text, (name, place)


def test_language_numbers():
    claims = {
        DENSE: ["muon", "scion", "horst", "adamw", "horst-muon", "adamw-l1"],
        AT_50: ["scion", "muon"],
        AT_60: ["horst-muon"],
        AT_70: ["horst-muon", "horst-l1", "spred", "adamw", "horst", "adamw-l1", "muon"],
        AT_80: ["adabreg", "horst-l1", "spred", "dwf", "adamw", "adamw-l1", "horst"],
        MAGNITUDE_80: ["adabreg", "horst-l1"],
        AT_90: ["dwf", "horst-l1"],
    }
    means_are_on_the_page("On a small GPT", LANGUAGE, ".2f", claims)


def test_language_dense_and_at_50():
    order = ["muon", "scion", "horst", "adamw"]
    assert all(ahead(*pair, DENSE) == 3 for pair in itertools.pairwise(order))
    assert ahead_of_all(["muon"], DENSE)
    assert compare.not_told_apart(list(LANGUAGE.values()), AT_50) == ["scion", "muon"]


def test_language_at_60_and_70():
    assert ahead_of_all(["horst-muon"], AT_60)
    assert ahead_of_all(["horst-muon", "horst-l1"], AT_70)
    assert 0 < ahead("horst-muon", "horst-l1", AT_70) < 3
    assert list(LANGUAGE)[2] == "spred"


def test_language_at_80_and_90():
    assert set(compare.not_told_apart(list(LANGUAGE.values()), AT_80)) == {"adabreg", "horst-l1", "spred", "dwf"}
    assert ahead("adabreg", "horst-l1", MAGNITUDE_80) == 3
    assert ahead_of_all(["dwf"], AT_90)
    assert ahead("dwf", "adamw", AT_90, DENSE) == 3
    others = {name: entry.mean(AT_90) for name, entry in LANGUAGE.items() if name != "dwf"}
    assert f"{LANGUAGE['dwf'].mean(AT_90):.2f}, the next has {min(others.values()):.2f}" in " ".join(PAGE.split())


@pytest.mark.parametrize(("mirrored", "plain"), [("horst", "adamw"), ("horst-l1", "adamw-l1")])
def test_language_the_mirror_step_under_adamw(mirrored, plain):
    assert all(ahead(mirrored, plain, place) == 3 for place in (DENSE, AT_50, AT_60, AT_70, AT_80))
    assert 0 < ahead(mirrored, plain, AT_90) < 3


def test_language_the_mirror_step_under_muon():
    assert ahead("muon", "horst-muon", DENSE) == 3
    assert 0 < ahead("horst-muon", "muon", AT_50) < 3
    assert all(ahead("horst-muon", "muon", place) == 3 for place in (AT_60, AT_70, AT_80, AT_90))


def test_language_l1():
    assert all(ahead("adamw-l1", "adamw", place) == 3 for place in (DENSE, AT_80))
    assert ahead("horst-l1", "horst", AT_80) == 3
    assert 0 < ahead("horst-l1", "horst", DENSE) < 3
    assert ahead("horst", "adamw-l1", AT_70) == 3
    assert ahead("adamw-l1", "horst", AT_80) == 3


def test_language_doubts():
    edges = [name for name, entry in LANGUAGE.items() if EDGE in entry.chosen]
    said = re.search(r"Nine best tries .*?: (.*?)\. They", words_of("On a small GPT"), flags=re.DOTALL)[1]
    assert sorted(re.findall(r"`([\w-]+)`", said)) == sorted(edges)
    assert len(edges) == 9
    cast = LANGUAGE["cast"].values(AT_70).values()
    assert (round(min(cast)), round(max(cast))) == (28, 74)
    (broken,) = [t for t in LANGUAGE["horst-muon"].tries if t["settings"] == {"lr": 0.008, "alpha": 20.0}]
    assert broken["criterion"] > compare.HUGE


def test_muon_l1_numbers():
    claims = {
        DENSE: ["muon", "horst-muon-l1"],
        AT_60: ["muon-l1"],
        AT_70: ["muon-l1", "muon-l1-horst", "horst-l1", "adamw-l1", "muon", "adamw"],
        MAGNITUDE_70: ["muon-l1", "horst-l1"],
        AT_80: ["muon-l1", "muon-l1-horst", "horst-muon-l1", "adabreg"],
        AT_90: ["dwf"],
    }
    means_are_on_the_page("Muon with `l1`", MUON_L1, ".2f", claims)


def test_muon_l1_is_compared_with_the_methods_that_are_bold_among_the_19():
    shown = [place for place in (DENSE, *PRUNED) if place != AT_60]  # the levels of the table
    bold = {name for place in shown for name in compare.not_told_apart(list(LANGUAGE.values()), place)}
    assert set(MUON_L1) == {"muon-l1", "muon-l1-horst", "horst-muon-l1", "adamw", "adamw-l1", *bold}
    assert len(LANGUAGE) == 19


def test_muon_l1_from_60_to_80():
    assert ahead_of_all(["muon-l1"], AT_70, MUON_L1, but=("muon-l1-horst",))
    assert 0 < ahead("muon-l1", "muon-l1-horst", AT_70, entries=MUON_L1) < 3
    for place in (AT_80, MAGNITUDE_70):
        assert ahead_of_all(["muon-l1"], place, MUON_L1)
    for place in (AT_60, AT_70, AT_80):
        assert min(MUON_L1, key=lambda name: MUON_L1[name].mean(place)) in ("muon-l1", "muon-l1-horst")
    without = [name for name in MUON_L1 if "muon" not in name]
    assert min(without, key=lambda name: MUON_L1[name].mean(AT_80)) == "adabreg"


def test_the_mirror_step_adds_nothing_to_muon_with_l1():
    for place in (AT_50, AT_60, AT_70):
        assert 0 < ahead("muon-l1-horst", "muon-l1", place, entries=MUON_L1) < 3
    assert ahead("muon-l1", "muon-l1-horst", AT_80, entries=MUON_L1) == 3
    for place in (DENSE, AT_50, AT_60, AT_70, AT_80):
        assert ahead("muon-l1", "horst-muon-l1", place, entries=MUON_L1) == 3
        assert ahead("horst-l1", "adamw-l1", place, entries=MUON_L1) == 3
    assert round(MUON_L1["adamw-l1"].mean(AT_70) / MUON_L1["horst-l1"].mean(AT_70), 2) == 1.14  # 12 % less


def test_muon_l1_four_times_as_long():
    text = PAGE.split("#### Four times as long")[1].split("<!-- table:")[0]
    claims = {
        DENSE: ["horst-muon-l1", "muon-l1", "adamw-l1", "horst-l1"],
        AT_70: ["muon-l1", "horst-l1", "adamw-l1"],
        AT_80: ["muon-l1", "horst-l1", "adamw-l1"],
    }
    for place, names in claims.items():
        for name in names:
            assert format(MUON_L1_LONG[name].mean(place), ".2f") in text, (name, place)
    ours = {place: MUON_L1_LONG["muon-l1"].values(place) for place in (AT_70, AT_80)}
    for place, values in ours.items():
        for name in MUON_L1_LONG.keys() - {"muon-l1"}:
            theirs = MUON_L1_LONG[name].values(place)
            assert all(values[seed] < theirs[seed] for seed in (1, 2)), (name, place)


def test_muon_without_l1_dense_and_at_50():
    assert compare.not_told_apart(list(MUON_L1.values()), DENSE) == ["muon", "scion"]
    assert set(compare.not_told_apart(list(MUON_L1.values()), AT_50)) == {"muon", "scion", "muon-l1", "muon-l1-horst"}
    assert ahead_of_all(["dwf"], AT_90, MUON_L1)


def test_muon_l1_against_the_table_of_the_19():
    assert {n for n in MUON_L1 if n in LANGUAGE and _best(MUON_L1[n]) != _best(LANGUAGE[n])} == {
        "adamw",
        "muon",
        "scion",
    }
    assert ahead("adabreg", "dwf", AT_80, entries=MUON_L1) == 3


def _best(entry):
    return next(each["settings"] for each in entry.tries if each["chosen"])


def test_vision_numbers():
    at_90 = ["set", "gmp", "rigl", "acdc", "lrr", "random"]
    masks = [f"{optimizer}+{mask}" for optimizer in ("adamw", "horst") for mask in at_90]
    alone = [f"{name}+one-shot" for name in ("adabreg", "dwf", "horst-l1", "adamw-l1")]
    claims = {SPARSE: [*masks, *alone], DENSE: ["horst-muon+one-shot", "adamw+one-shot"]}
    means_are_on_the_page("On digits", VISION, ".1f", claims)


def test_vision_set_and_random_masks():
    assert ahead_of_all(["adamw+set"], SPARSE, VISION, but=["horst+gmp"])
    assert ahead("horst+gmp", "adamw+set", SPARSE, entries=VISION) == 1
    for mask in ("acdc", "gmp", "rigl", "lrr"):
        assert ahead("adamw+random", f"adamw+{mask}", SPARSE, entries=VISION) == 3


@pytest.mark.parametrize(
    ("mask", "seeds"), [("gmp", 3), ("rigl", 3), ("acdc", 2), ("lrr", 2), ("random", 2), ("set", 0)]
)
def test_vision_the_mirror_step_under_masks(mask, seeds):
    assert ahead(f"horst+{mask}", f"adamw+{mask}", SPARSE, entries=VISION) == seeds


def test_vision_without_masks():
    assert ahead("adabreg+one-shot", "horst-l1+one-shot", SPARSE, entries=VISION) == 3
    assert ahead("horst-l1+one-shot", "adamw-l1+one-shot", SPARSE, entries=VISION) == 3
    plain = [VISION[f"{name}+one-shot"] for name in ("adamw", "horst", "muon", "horst-muon")]
    assert max(value for entry in plain for value in entry.values(SPARSE).values()) < 34.5
    assert ahead_of_all(["horst-muon+one-shot"], DENSE, VISION)


def test_vision_doubts():
    acdc = [f"{value:.1f}" for _, value in sorted(VISION["adamw+acdc"].values(SPARSE).items())]
    assert f"{acdc[0]}, {acdc[1]} and {acdc[2]}" in PAGE
    edges = [entry.chosen for entry in VISION.values() if EDGE in entry.chosen]
    rates = [chosen for chosen in edges if f"lr 0.03{EDGE}" in chosen]
    assert f"{len(edges)} of {len(VISION)} best tries" in PAGE
    assert re.search(rf"\(†\), {len(rates)} of them at\s+the largest learning rate", PAGE)


def perplexity(file, method, level):
    rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    return next(r["perplexity"] for r in rows if (r["method"], r["sparsity"]) == (method, level))


HORST_L1 = [f"evidence/gpt2_auto_l1_0.015_seed{i}" for i in range(3)]
ADAMW = ["table6_gpt2_adamw_beta2_0.999", "gpt2_headline/gpt2_adamw_seed1", "evidence/gpt2_adamw_seed2"]
MUON = "rivals/gpt2_muon_seed0"
SAME_SEED = 0.35  # how much two runs of one seed differ


def test_gpt2_at_70_is_below_dense_adamw_in_each_seed():
    ours = [perplexity(file, "sparsegpt-global", 0.7) for file in HORST_L1]
    dense = [perplexity(file, "dense", 0.0) for file in ADAMW]
    assert all(pruned < whole for pruned, whole in zip(ours, dense, strict=True))
    for values in (ours, dense):
        assert ", ".join(f"{value:.2f}" for value in values) in GPT2_STUDY
    assert f"{perplexity('gpt2_headline/gpt2_adamw_l1_0.01_seed0', 'sparsegpt', 0.7):.2f}" in GPT2_STUDY
    assert f"{sum(perplexity(file, 'sparsegpt', 0.7) for file in ADAMW[1:]) / 2:.2f}" in GPT2_STUDY


@pytest.mark.parametrize(("level", "muon_wins"), [(0.5, True), (0.6, True), (0.7, False), (0.8, False)])
def test_gpt2_muon_is_best_up_to_60_and_horst_from_70_on(level, muon_wins):
    ours = [perplexity(file, "sparsegpt-global", level) for file in HORST_L1]
    muon = perplexity(MUON, "sparsegpt", level)
    assert all((muon < value) == muon_wins and abs(muon - value) > SAME_SEED for value in ours)
    others = [("gpt2_headline/gpt2_adamw_l1_0.01_seed0", "sparsegpt"), (ADAMW[1], "sparsegpt"), (ADAMW[2], "sparsegpt")]
    others.append(("evidence/gpt2_adamw_l1_0.015_seed1", "sparsegpt-global"))
    assert all(min(muon, *ours) < perplexity(file, method, level) for file, method in others)
    for value in (muon, sum(ours) / 3):
        assert f"{value:.2f}" in words_of_gpt2()
        assert not muon_wins or f"{value:.2f}" in GPT2_STUDY


def test_gpt2_muon_by_magnitude_dense_and_at_90():
    ours = {level: sum(perplexity(file, "magnitude-global", level) for file in HORST_L1) / 3 for level in (0.5, 0.6)}
    muon = {level: perplexity(MUON, "magnitude", level) for level in ours}
    assert abs(ours[0.5] - muon[0.5]) < SAME_SEED
    assert muon[0.6] - ours[0.6] > 10
    assert all(f"{value:.2f}" in words_of_gpt2() for value in (*ours.values(), *muon.values()))
    assert f"At 90 % Muon has {perplexity(MUON, 'sparsegpt', 0.9):.0f}." in words_of_gpt2()
    dense = [perplexity(file, "dense", 0.0) for file in (MUON, "table6_gpt2_alpha5_beta2_0.999", ADAMW[0])]
    assert dense == sorted(dense)
    assert "{:.2f} and {:.2f}; AdamW {:.2f}".format(*dense) in GPT2_STUDY


def test_gpt2_muon_takes_longer_and_horst_muon_broke_down():
    speed = json.loads((RESULTS / f"{MUON}.json").read_text())["curves"]["training"][0]["tokens_per_second"]
    rows = json.loads((ROOT / "benchmarks/results/training_h200.json").read_text())["rows"]
    idle = [row["rate"] for row in rows if "tokens" in row["what"] and row["settings"] == "default"]
    assert f"{speed / 1000:.0f} k tokens per second" in words_of_gpt2()
    assert all(f"{rate / speed:.1f}" in ("1.7", "1.8") and round(rate, -4) in (560_000, 570_000) for rate in idle)
    rows = json.loads((RESULTS / "rivals/gpt2_horst_muon_l1_seed0.json").read_text())["rows"]
    assert {row["broke_down"] for row in rows} == {"the loss is nan at step 4050"}
    assert "broke down: the loss is nan at step 4050" in PAGE


def words_of_gpt2():
    return PAGE.split("## On GPT-2 small\n")[1].split("<!-- /table -->")[1].split("\n## ")[0]


def test_deit_at_90_is_within_reach_of_dense_adamw():
    def accuracies(*files):
        rows = [row for file in files for row in json.loads((RESULTS / f"rule/{file}.json").read_text())["rows"]]
        return [100 * row["top1"] for row in sorted(rows, key=lambda row: row["seed"])]

    ours = accuracies(*(f"cifar10_auto_seed{i}" for i in range(3)))
    dense = accuracies("cifar10_adamw_dense", "cifar10_adamw_dense_seeds_1_2")
    assert sum(whole > pruned for pruned, whole in zip(ours, dense, strict=True)) == 2
    assert "Dense AdamW is better in two seeds of three" in VISION_STUDY
    text = " ".join(VISION_STUDY.split())
    for values in (ours, dense):
        assert "{:.2f}, {:.2f} and {:.2f}".format(*values) in text
    assert f"0.2 points in the mean ({sum(ours) / 3:.2f} against {sum(dense) / 3:.2f})" in text


def test_a_folded_table_is_markdown_within_html():
    text = compare_page.folded("More", Table(columns=["x"], rows=[["1"]]))
    assert text == '<details markdown="1"><summary>More</summary>\n\n| x |\n|---|\n| 1 |\n\n</details>'


def test_without_a_result_the_page_says_so():
    assert compare_page.comparison([]) == ["Not measured yet."]
