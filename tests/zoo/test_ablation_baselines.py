"""Several baselines, of which a variant may have its own: pairs, one family of tests, honesty."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zoo.ablation import Plan, Variant, compare_pairs, describe, holm, split_commas
from zoo.ablation.analysis import analyse, compare_all

SITES = ("pre", "post", "standard", "identity")


def grid(seeds: int = 3, recipe: str = "recipe.py") -> Plan:
    """The host, and at each site a constant gate and two modules, as ablate_insertion.py has it."""
    variants = [Variant("none")]
    for site in SITES:
        variants.append(Variant(f"constant@{site}"))
        own = {"constant": f"constant@{site}"}
        variants += [Variant(f"{kind}@{site}", baselines=own) for kind in ("se", "eca")]
    return Plan(recipe, variants, range(seeds), baselines=["none", "constant"])


def simulated(rng, plan: Plan, effect: float = 0.0, step: float = 0.0):
    """Seeds good or bad for all variants, and noise of each cell; modules better by `effect`."""
    common = rng.normal(60.0, 1.0, len(plan.seeds))
    values = {}
    for variant in plan.variants:
        x = common + rng.normal(0.0, 0.8, len(common)) + effect * bool(variant.baselines)
        values[variant.name] = dict(enumerate(np.round(x / step) * step if step else x))
    return values


def test_each_variant_is_paired_with_its_own_baseline():
    plan = grid()
    pairs = plan.pairs()
    assert len(pairs["none"]) == 12
    assert pairs["constant"] == [
        (f"{kind}@{site}", f"constant@{site}") for site in SITES for kind in ("se", "eca")
    ]
    assert plan.comparisons == 20
    mirrored = Plan("r.py", [Variant(x) for x in "abc"], [0], baselines=["a", "b"])
    assert mirrored.pairs() == {"a": [("b", "a"), ("c", "a")], "b": [("a", "b"), ("c", "b")]}
    assert mirrored.comparisons == 3


def test_a_baseline_of_its_own_must_exist():
    for own in ({"constant": "no"}, {"other": "a"}):
        with pytest.raises(ValueError, match="variant 'b' has"):
            Plan("r.py", [Variant("a"), Variant("b", baselines=own)], [0], baselines=["a"])
    with pytest.raises(ValueError, match=r"baselines \(constant\) must be among"):
        Plan("r.py", [Variant("a"), Variant("b")], [0], baselines=["a", "constant"])


def test_correction_is_over_all_baselines():
    plan, rng = grid(seeds=5), np.random.default_rng(0)
    found = compare_all(plan, simulated(rng, plan))
    flat = [each for comparisons in found.values() for each in comparisons]
    assert [each.p_holm for each in flat] == pytest.approx(holm([each.p for each in flat]))
    assert {each.baseline for each in found["constant"]} == {f"constant@{s}" for s in SITES}


def test_a_pair_and_its_mirror_image_count_once():
    rng = np.random.default_rng(1)
    values = {name: dict(enumerate(rng.normal(size=5))) for name in "ab"}
    one, two = compare_pairs(values, [("a", "b"), ("b", "a")])
    assert one.p_holm == two.p_holm == one.p == two.p
    assert one.difference == pytest.approx(-two.difference)


@pytest.mark.parametrize(("seeds", "step"), [(3, 0.0), (5, 100 / 328)])
def test_honesty_against_both_baselines(seeds, step):
    """Any false claim in a whole report in at most 5 % of 1,000 repetitions, two errors more."""
    plan, rng, repetitions = grid(seeds), np.random.default_rng(2), 1000
    claims = 0
    for _ in range(repetitions):
        found = compare_all(plan, simulated(rng, plan, step=step))
        verdicts = [each.verdict for comparisons in found.values() for each in comparisons]
        assert len(verdicts) == 20
        claims += any(verdict in ("better", "worse") for verdict in verdicts)
    assert claims / repetitions <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)


def test_honesty_of_the_intervals_to_each_baseline():
    plan, rng = grid(seeds=4), np.random.default_rng(3)
    covered: dict[str, list[bool]] = {"none": [], "constant": []}
    for _ in range(400):
        for baseline, found in compare_all(plan, simulated(rng, plan, effect=0.7)).items():
            modules = [each for each in found if not each.variant.startswith("constant")]
            covered[baseline] += [each.low <= 0.7 <= each.high for each in modules]
    for hits in covered.values():
        assert len(hits) == 3200
        assert 0.93 <= np.mean(hits) <= 0.97


def test_a_large_difference_is_shown_against_both():
    plan, rng = grid(seeds=8), np.random.default_rng(4)
    found = compare_all(plan, simulated(rng, plan, effect=12.0))
    for comparisons in found.values():
        for each in comparisons:
            null = each.variant.startswith("constant")
            assert each.verdict == ("no difference shown at n = 8" if null else "better")


def test_one_seed_gives_numbers_and_no_verdict():
    plan = grid(seeds=1)
    values = simulated(np.random.default_rng(5), plan)
    rows = [
        {"variant": name, "seed": 0, "metrics": {"val/top1": value[0]}, "data": "d", "epochs": 1}
        for name, value in values.items()
    ]
    found = analyse(plan, rows, {})
    assert all(each.low is None and each.mean is not None for each in found.summaries)
    for comparisons in found.comparisons.values():
        for each in comparisons:
            assert (each.low, each.p_holm, each.verdict) == (None, None, "one seed: no verdict")


def test_the_forecast_knows_both_baselines_and_estimates_before_the_first_cell(tmp_path):
    text = describe(grid(), tmp_path / "none", workers=2, estimate=lambda: 60.0)
    assert "39 cells" in text
    assert "constant@pre (baseline)" in text
    assert "se@pre " in text
    assert "about 0:19:30 for what is left (39 cells, 2 at once; from a timed step)" in text
    assert "when 20 are tested" in text
    assert "one seed gives no verdict" in describe(grid(seeds=1), tmp_path / "none")


@pytest.mark.parametrize(
    "line",
    [
        "--kinds se,eca --workers 2 --stages all,1+2",
        "--kinds se eca --workers 2 --stages all 1+2",
        "--kinds=se,eca --workers 2 --stages=all, 1+2",
    ],
)
def test_lists_take_commas_and_spaces(line):
    spread = "--kinds se eca --workers 2 --stages all 1+2"
    assert split_commas(line.split(), ("kinds", "stages")) == spread.split()


def test_only_values_of_the_flags_named_are_split():
    words = split_commas(["--rd-ratios", "1/4,1/8", "--out", "a,b"], ("rd_ratios",))
    assert " ".join(words) == "--rd-ratios 1/4 1/8 --out a,b"
