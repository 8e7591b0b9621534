"""What the studies of small models say in words holds in their result files, seed by seed."""

import pathlib
import statistics

import pytest

from horst.lab.experiments.result import Result

ROOT = pathlib.Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/studies/language_small.md").read_text(encoding="utf-8").split())
ROWS = [
    row
    for name in ("frontier_language", "frontier_language_learning_rates", "frontier_language_muon")
    for row in Result.load(ROOT / f"results/transformers/{name}.json").rows
]
LONGEST_ROWS, SMALLER_ROWS = (
    Result.load(ROOT / f"results/transformers/frontier_language_{name}.json").rows
    for name in ("12800_steps", "width_40")
)
DENSE, GLOBAL, MAGNITUDE = "dense", "sparsegpt-global", "magnitude"
PLAIN = {"norm_lr_ratio": None, "embedding_lr_ratio": None, "max_step": None}


def perplexity(optimizer, method, sparsity=0.0, steps=800, beta2=0.95, rows=ROWS, **settings):
    """Perplexity by seed of one contender; settings that are not named are the usual ones."""
    wanted = {**PLAIN, "optimizer": optimizer, "method": method, "sparsity": sparsity, "steps": steps, "beta2": beta2}
    if "mirror" not in settings and optimizer.startswith("horst"):
        wanted["mirror"] = "all"
    wanted |= settings
    found = {row["seed"]: row["perplexity"] for row in rows if all(row.get(k) == v for k, v in wanted.items())}
    assert set(found) == ({0, 1} if rows is LONGEST_ROWS else {0, 1, 2}), (wanted, found)
    return [found[seed] for seed in sorted(found)]


def ahead(ours, theirs):
    return all(one < other for one, other in zip(ours, theirs, strict=True))


def said(*values, spec=".2f"):
    """Whether the page has the means."""
    return all(format(statistics.mean(value), spec) in PAGE for value in values)


ADAMW = [perplexity("adamw", DENSE, lr=lr) for lr in (5e-4, 2e-3, 4e-3, 8e-3, 1.6e-2)]
BEST_ADAMW = min(ADAMW, key=statistics.mean)
AUTO = {lr: perplexity("horst", DENSE, alpha="auto", lr=lr) for lr in (5e-4, 2e-3, 8e-3, 1.6e-2)}
BOUND = {"lr": 8e-3, "max_step": 0.00164}
PARTS = {
    "norms": "all, not matrix, embedding, position",
    "all but norms": "all, not norm",
    "blocks": "all, not norm, embedding, position",
    "embeddings": "all, not norm, matrix",
}


def part(name, method, sparsity=0.0, **settings):
    optimizer = "horst-l1" if "l1" in settings else "horst"
    return perplexity(optimizer, method, sparsity, alpha=27.3, mirror=PARTS[name], **BOUND, **settings)


def test_horst_is_ahead_of_the_best_dense_adamw_in_every_seed():
    best = min(AUTO.values(), key=statistics.mean)
    assert ahead(best, BEST_ADAMW)
    assert said(best, BEST_ADAMW)
    assert f"{1 - statistics.mean(best) / statistics.mean(BEST_ADAMW):.0%}".rstrip("%") + " %" in PAGE


@pytest.mark.parametrize("method", [GLOBAL, MAGNITUDE])
def test_with_l1_four_fifths_are_free(method):
    pruned = perplexity("horst-l1", method, 0.8, alpha="auto", lr=8e-3, l1=0.08)
    assert ahead(pruned, BEST_ADAMW)
    assert said(pruned)
    if method == GLOBAL:
        adamw = perplexity("adamw-l1", method, 0.8, lr=8e-3, l1=0.08)
        assert ahead(pruned, adamw)
        assert said(adamw)


def test_the_parts_of_the_step_dense():
    bound = perplexity("horst", DENSE, alpha=0.0, **BOUND)
    whole = AUTO[8e-3]
    parts = {name: part(name, DENSE) for name in PARTS}
    assert said(bound, whole, *parts.values())
    assert all(ahead(whole, found) or name == "all but norms" for name, found in parts.items())
    assert all(ahead(found, bound) for found in parts.values())
    assert not ahead(bound, BEST_ADAMW)


def test_surviving_magnitude_pruning_is_the_block_matrices():
    adamw = perplexity("adamw", MAGNITUDE, 0.7, lr=8e-3)
    bound = perplexity("horst", MAGNITUDE, 0.7, alpha=0.0, **BOUND)
    whole = perplexity("horst", MAGNITUDE, 0.7, alpha="auto", lr=8e-3)
    blocks, norms = part("blocks", MAGNITUDE, 0.7), part("norms", MAGNITUDE, 0.7)
    assert said(adamw, bound, whole, blocks, norms)
    assert ahead(blocks, adamw)
    assert ahead(blocks, bound)
    assert statistics.mean(norms) > statistics.mean(adamw)


def test_learning_rates_of_their_own_do_not_replace_the_mirror_step():
    keys = [
        {name: row.get(name) for name in ("lr", "norm_lr_ratio", "embedding_lr_ratio")}
        for row in ROWS
        if row["optimizer"] == "adamw" and row["method"] == DENSE and row["seed"] == 0
    ]  # fmt: skip
    tuned = [perplexity("adamw", DENSE, **key) for key in keys if key["norm_lr_ratio"] or key["embedding_lr_ratio"]]
    assert len(tuned) == 8
    assert "Eight settings" in PAGE
    best, worst = min(tuned, key=statistics.mean), max(tuned, key=statistics.mean)
    assert said(best, worst)
    assert all(ahead(AUTO[8e-3], other) for other in tuned)
    assert f"{1 - statistics.mean(best) / statistics.mean(BEST_ADAMW):.0%}".rstrip("%") + " % better than AdamW" in PAGE
    assert f"{statistics.mean(best) / statistics.mean(AUTO[8e-3]) - 1:.0%}".rstrip("%") + " % worse than HORST" in PAGE


def test_with_l1_the_parts_differ_less():
    settings = {"lr": 8e-3, "l1": 0.04}
    found = [
        part("norms", GLOBAL, 0.7, l1=0.04),
        part("all but norms", GLOBAL, 0.7, l1=0.04),
        perplexity("horst-l1", GLOBAL, 0.7, alpha="auto", **settings),
        perplexity("adamw-l1", GLOBAL, 0.7, **settings),
        perplexity("adamw-l1", GLOBAL, 0.7, norm_lr_ratio=6.0, **settings),
    ]
    assert said(*found)
    assert all(ahead(ours, theirs) for ours in found[:3] for theirs in found[3:])


def test_over_a_factor_of_32_in_the_learning_rate():
    assert said(min(AUTO.values(), key=statistics.mean), spec=".1f")
    assert said(max(AUTO.values(), key=statistics.mean), spec=".1f")
    assert said(min(ADAMW, key=statistics.mean), max(ADAMW, key=statistics.mean), spec=".1f")
    assert said(perplexity("horst", MAGNITUDE, 0.7, alpha="auto", lr=5e-4))


def at_best(optimizer, method, sparsity=0.0, steps=3200, **settings):
    """The best mean over the learning rates that were run."""
    rates = {r["lr"] for r in ROWS if r["optimizer"] == optimizer and r["steps"] == steps and r["beta2"] == 0.95}
    if optimizer == "adamw":
        rates -= {5e-4, 1.6e-2}
    return min((perplexity(optimizer, method, sparsity, steps, lr=lr, **settings) for lr in rates), key=statistics.mean)


def test_after_four_times_as_many_steps_the_dense_lead_is_gone():
    dense = at_best("adamw", DENSE)
    horst = at_best("horst", DENSE, alpha="auto")
    with_l1 = at_best("horst-l1", DENSE, alpha="auto", l1=0.02)
    assert said(dense, horst, with_l1)
    assert abs(statistics.mean(horst) / statistics.mean(dense) - 1) < 0.01
    pruned = at_best("horst-l1", GLOBAL, 0.7, alpha="auto", l1=0.02)
    assert said(pruned, at_best("adamw-l1", GLOBAL, 0.7, l1=0.02))
    assert f"{statistics.mean(pruned) / statistics.mean(dense) - 1:.0%}" == "2%"


def test_after_four_times_as_many_steps_the_lead_after_pruning_is_larger():
    for method in (MAGNITUDE, "sparsegpt", GLOBAL):
        for level in (0.7, 0.8):
            ours = at_best("horst-l1", method, level, alpha="auto", l1=0.02)
            theirs = at_best("adamw", method, level), at_best("adamw-l1", method, level, l1=0.02)
            assert all(ahead(ours, other) for other in theirs)
            if level == 0.7 and method != GLOBAL:
                assert said(ours, *theirs)
    long = statistics.mean(at_best("adamw", MAGNITUDE, 0.7)) / statistics.mean(at_best("adamw", DENSE))
    short = [perplexity("adamw", MAGNITUDE, 0.7, lr=lr) for lr in (5e-4, 2e-3, 4e-3, 8e-3)]
    assert f"{long:.1f} times its dense perplexity" in PAGE
    assert f"{min(map(statistics.mean, short)) / statistics.mean(BEST_ADAMW):.1f} times" in PAGE


def longest(optimizer, method, sparsity=0.0, width=64, **settings):
    """The best mean over the learning rates of the longest training, of two seeds."""
    rows = [row for row in LONGEST_ROWS if row["optimizer"] == optimizer and row["width"] == width]
    rates = {row["lr"] for row in rows if row["beta2"] == settings.get("beta2", 0.95)}
    where = {"rows": LONGEST_ROWS, "steps": 12_800, "width": width, **settings}
    return min((perplexity(optimizer, method, sparsity, lr=lr, **where) for lr in rates), key=statistics.mean)


def test_after_sixteen_times_as_many_steps_dense_adamw_is_ahead_and_falls_apart_when_pruned():
    dense, horst = longest("adamw", DENSE), longest("horst", DENSE, alpha="auto")
    with_l1 = longest("horst-l1", DENSE, alpha="auto", l1=0.01)
    assert ahead(dense, horst)
    assert ahead(dense, with_l1)
    assert said(dense, horst, with_l1)
    for method in (MAGNITUDE, GLOBAL):
        pruned = longest("adamw", method, 0.7)
        assert said(pruned)
        assert f"{statistics.mean(pruned) / statistics.mean(dense):.1f} times" in PAGE


@pytest.mark.parametrize("level", [0.7, 0.8])
def test_after_sixteen_times_as_many_steps_horst_with_l1_is_ahead_when_pruned(level):
    ours = longest("horst-l1", GLOBAL, level, alpha="auto", l1=0.01)
    theirs = [
        longest("adamw", GLOBAL, level),
        longest("adamw-l1", GLOBAL, level, l1=0.01),
        longest("horst", GLOBAL, level, alpha="auto"),
    ]
    assert said(ours, *theirs)
    assert all(ahead(ours, other) for other in theirs)


def test_zeros_get_dearer_as_the_readme_says():
    costs = []
    for best_of, l1 in ((at_best, 0.02), (longest, 0.01)):  # after 3,200 and 12,800 steps
        dense = statistics.mean(best_of("adamw", DENSE))
        pruned = [
            best_of("horst-l1", GLOBAL, 0.7, alpha="auto", l1=l1),
            best_of("adamw-l1", GLOBAL, 0.7, l1=l1),
            best_of("adamw", GLOBAL, 0.7),
        ]
        costs.append([f"{statistics.mean(found) / dense - 1:.0%}".replace("%", " %") for found in pruned])
    paths = [ROOT / "README.md", ROOT / "docs/what_to_use.md"]
    pages = [" ".join(path.read_text(encoding="utf-8").split()) for path in paths]
    for page in pages:
        assert f"cost {costs[0][0]} after 15" in page
        assert f"{costs[1][0]}" in page
        assert f"with AdamW and `l1` {costs[1][1]}, with AdamW {costs[1][2]}" in page


def test_seventy_percent_zeros_are_better_than_a_smaller_dense_model():
    smaller = {"rows": SMALLER_ROWS, "width": 40}
    for steps, l1 in ((800, (0.04, 0.08)), (3200, (0.02,))):
        sparse = min(
            (perplexity("horst-l1", GLOBAL, 0.7, steps, alpha="auto", lr=lr, l1=strength)
             for lr in (2e-3, 8e-3) for strength in l1 if lr == 8e-3 or strength != 0.08),
            key=statistics.mean,
        )  # fmt: skip
        dense = [perplexity("adamw", DENSE, steps=steps, lr=lr, **smaller) for lr in (4e-3, 8e-3, 1.6e-2)]
        dense += [perplexity("horst", DENSE, steps=steps, alpha="auto", lr=lr, **smaller) for lr in (2e-3, 8e-3)]
        assert all(ahead(sparse, other) for other in dense)
    sparse = longest("horst-l1", GLOBAL, 0.7, alpha="auto", l1=0.01)
    assert ahead(sparse, longest("adamw", DENSE, width=40))
    assert ahead(sparse, longest("horst", DENSE, width=40, alpha="auto"))


def test_weights_grow_without_bound_with_the_smaller_second_beta():
    def largest(rows, **wanted):
        chosen = [row for row in rows if row["method"] == DENSE and row["optimizer"].startswith("horst")]
        return [row["largest"] for row in chosen if all(row[key] == value for key, value in wanted.items())]

    usual = {"alpha": "auto", "beta2": 0.95}
    assert 1 < min(largest(ROWS, steps=800, **usual)) < max(largest(ROWS, steps=800, **usual)) < 7
    assert 7 < min(largest(ROWS, steps=3200, **usual)) < max(largest(ROWS, steps=3200, **usual)) < 102
    assert 3000 < min(largest(LONGEST_ROWS, width=64, **usual)) < max(largest(LONGEST_ROWS, **usual)) < 11_450
    assert 8 < min(largest(LONGEST_ROWS, beta2=0.99)) < max(largest(LONGEST_ROWS, beta2=0.99)) < 11.5


def test_a_smaller_rate_after_long_training():
    """The first of the long rows on the page of the rule."""
    page = " ".join((ROOT / "docs/studies/alpha_rule.md").read_text(encoding="utf-8").split())
    rows = Result.load(ROOT / "results/transformers/frontier_language_12800_rate.json").rows
    assert {row["alpha_lr"] for row in rows} == {0.01}
    small = {level: [row["perplexity"] for row in rows if row["method"] == GLOBAL and row["sparsity"] == level]
             for level in (0.7, 0.8)}  # fmt: skip
    settings = {"alpha": "auto", "l1": 0.01}
    for level, found in small.items():
        larger = [longest("horst-l1", GLOBAL, level, beta2=beta2, **settings) for beta2 in (0.99, 0.95)]
        first, second, third = (f"{statistics.mean(one):.2f}" for one in (found, *larger))
        assert f"{first}, {second} and {third}" in page
        assert all(ahead(other, found) for other in larger)
    dense = [row for row in rows if row["method"] == DENSE]
    assert 2 < min(row["largest"] for row in dense) < max(row["largest"] for row in dense) < 5.5
    cost = statistics.mean(row["perplexity"] for row in dense) / statistics.mean(longest("adamw", DENSE)) - 1
    assert f"3 to 5 | {cost:.0%}".replace("%", " % worse") in page


def test_a_larger_second_beta_after_long_training():
    settings = {"alpha": "auto", "l1": 0.01}
    dense = longest("horst-l1", DENSE, beta2=0.99, **settings)
    assert ahead(dense, longest("horst-l1", DENSE, **settings))
    assert ahead(longest("adamw", DENSE), dense)
    assert ahead(longest("horst-l1", GLOBAL, 0.8, **settings), longest("horst-l1", GLOBAL, 0.8, beta2=0.99, **settings))
    assert said(dense, *(longest("horst-l1", GLOBAL, level, beta2=0.99, **settings) for level in (0.7, 0.8)))


def test_the_second_beta():
    here = perplexity("horst", DENSE, alpha="auto", lr=8e-3)
    other = perplexity("horst", DENSE, alpha="auto", lr=8e-3, beta2=0.999)
    adamw = perplexity("adamw", DENSE, lr=4e-3, beta2=0.999)
    assert ahead(here, other)
    assert ahead(here, adamw)
    assert said(here, other, adamw)


def test_muon_is_best_up_to_70_percent_and_horst_with_l1_at_80():
    muon = {level: perplexity("muon", GLOBAL if level else DENSE, level, lr=8e-3) for level in (0.0, 0.5)}
    muon_l1 = {level: perplexity("muon-l1", GLOBAL, level, lr=8e-3, l1=0.04) for level in (0.6, 0.7)}
    muon_l1[0.8] = perplexity("muon-l1", GLOBAL, 0.8, lr=8e-3, l1=0.08)
    horst_l1 = {level: perplexity("horst-l1", GLOBAL, level, alpha="auto", lr=8e-3, l1=0.04) for level in (0.6, 0.7)}
    horst_l1[0.8] = perplexity("horst-l1", GLOBAL, 0.8, alpha="auto", lr=8e-3, l1=0.08)
    horst = {0.0: AUTO[1.6e-2], 0.5: perplexity("horst", GLOBAL, 0.5, alpha="auto", lr=1.6e-2)}
    assert all(ahead(muon[level], horst[level]) for level in muon)
    assert all(ahead(muon_l1[level], horst_l1[level]) for level in (0.6, 0.7))
    assert ahead(horst_l1[0.8], muon_l1[0.8])
    assert said(*muon.values(), *horst.values(), *muon_l1.values(), *horst_l1.values())


# --- digits -----------------------------------------------------------------------------------------------------------

DIGITS = Result.load(ROOT / "results/transformers/frontier_vision.json").rows
VISION_PAGE = " ".join((ROOT / "docs/studies/vision.md").read_text(encoding="utf-8").split())


def accuracy(optimizer, lr, sparsity=0.9, alpha=0.0):
    wanted = {"optimizer": optimizer, "lr": lr, "sparsity": sparsity, "alpha": alpha}
    found = {row["seed"]: 100 * row["top1"] for row in DIGITS if all(row[k] == v for k, v in wanted.items())}
    assert set(found) == {0, 1, 2}
    return [found[seed] for seed in sorted(found)]


def test_auto_carries_over_learning_rates_on_digits():
    rates = (1e-3, 3e-3, 1e-2, 3e-2)
    auto = {lr: accuracy("horst", lr, alpha="auto") for lr in rates}
    others = [{lr: accuracy(name, lr, alpha=alpha) for lr in rates} for name, alpha in (("adamw", 0.0), ("horst", 5.0))]
    for found in (auto, *others):
        means = [statistics.mean(values) for values in found.values()]
        assert f"{min(means):.1f} to {max(means):.1f}" in VISION_PAGE
    assert all(ahead(other[lr], auto[lr]) for other in others for lr in rates)  # less accurate in every seed
    dense = max((accuracy("adamw", lr, sparsity=0.0) for lr in rates), key=statistics.mean)
    assert all(ahead(dense, auto[lr]) for lr in rates[1:])
    product = accuracy("horst", 3e-3, alpha=33.3333333)
    for values in (dense, product):
        assert f"{statistics.mean(values):.1f}" in VISION_PAGE
