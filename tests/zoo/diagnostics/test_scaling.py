from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zoo.diagnostics import scaling
from zoo.diagnostics.scaling import Scaling, exponent, exponents, plot, print_tables

DIM = 16


class Pairs(nn.Module):
    """Builds and keeps one float for each pair of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).tanh() @ x


def pairs(n: int) -> nn.Module:
    return Pairs()


def linear(n: int) -> nn.Module:
    return nn.Linear(DIM, DIM)


def exact(name: str, value: float, task: str = "train") -> list[dict]:
    """Rows of a cost that grows as n to the power of `value`."""
    return [
        {
            "task": task, "candidate": name, "n": n, "rounds": 3, "median_ms": n**value / 1e3,
            "peak_mib": n / 256,
        }
        for n in (256, 1024, 4096, 16384)
    ]  # fmt: skip


def test_every_task_length_and_candidate_has_a_row():
    builds = {"pairs": pairs, "linear": linear}
    rows, skipped = Scaling(builds, DIM, repeats=3).measure([64, 32, 64])
    found = [(row["task"], row["n"], row["candidate"]) for row in rows]
    assert sorted(found) == sorted(
        (task, n, name) for task in ("infer", "train") for n in (32, 64) for name in builds
    )
    assert skipped == []
    for row in rows:
        assert row["rounds"] == 3
        assert row["median_ms"] > 0
        assert not {"rival_of", "ratio", "over_baseline"} & row.keys()


def test_peak_and_kept_memory_equal_the_formula():
    rows, _ = Scaling({"linear": linear, "pairs": pairs}, DIM, repeats=3).measure([1024])
    found = {(row["task"], row["candidate"]): row for row in rows}
    output, matrix = 1024 * DIM * 4 / 2**20, 1024**2 * 4 / 2**20
    assert found["infer", "linear"]["peak_mib"] == pytest.approx(output)
    # The output; then the gradients of the input, the weight and the bias, and a row of ones.
    assert output < found["train", "linear"]["peak_mib"] < 3 * output + 0.01
    assert found["train", "linear"]["kept_mib"] == 0
    assert found["infer", "pairs"]["peak_mib"] == pytest.approx(2 * matrix)
    assert found["train", "pairs"]["kept_mib"] == pytest.approx(matrix)
    assert found["train", "pairs"]["peak_mib"] > 2 * matrix


def test_the_layers_train_in_training_and_do_not_in_inference():
    seen = set()

    class Mode(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add((self.training, torch.is_inference_mode_enabled()))
            return super().forward(x)

    Scaling({"mode": lambda n: Mode(DIM, DIM)}, DIM, repeats=3).measure([8])
    assert seen == {(True, False), (False, True)}


def test_rivals_and_baseline_have_ratios():
    scale = Scaling(
        {"slow": pairs, "fast": linear}, DIM, 5, rivals={"slow": "fast"}, baseline="fast"
    )
    rows, _ = scale.measure([512])
    for row in rows:
        if row["candidate"] == "fast":
            assert row["over_baseline"] == 1
            assert "ratio" not in row
        else:
            low, high = row["interval"]
            assert row["rival_of"] == "fast"
            assert row["ratio"] > 1
            assert low <= row["ratio"] <= high
            assert row["over_baseline"] == pytest.approx(row["ratio"])


def test_a_candidate_ends_where_it_is_told_to():
    rows, skipped = Scaling({"pairs": pairs}, DIM, 3, longest={"pairs": 32}).measure([32, 33])
    assert {row["n"] for row in rows} == {32}
    assert [(row["candidate"], row["n"]) for row in skipped] == [("pairs", 33)]
    assert "32 tokens" in skipped[0]["why"]


@pytest.mark.parametrize("build", [pairs, linear])
def test_memory_is_foreseen_before_it_is_needed(build):
    scale = Scaling({"it": build}, DIM, repeats=3)
    rows, _ = scale.measure([2048])
    peak = next(row["peak_mib"] for row in rows if row["task"] == "train")
    assert scale.foreseen_bytes("it", 2048) / 2**20 == pytest.approx(peak, rel=0.1)


def test_what_does_not_fit_into_memory_is_not_run(monkeypatch):
    """At 4,096 tokens the pairs take 128 MiB and more, the linear layer less than 1."""
    monkeypatch.setattr(scaling, "free_bytes", lambda device: 100 * 2**20)
    lengths = []

    def watched(n: int) -> nn.Module:
        lengths.append(n)
        return Pairs()

    rows, skipped = Scaling({"pairs": watched, "linear": linear}, DIM, 3).measure([256, 4096])
    assert max(lengths) == 512, "the largest is an eighth"
    assert {(row["candidate"], row["n"]) for row in rows} == {
        ("pairs", 256), ("linear", 256), ("linear", 4096),
    }  # fmt: skip
    assert [(row["candidate"], row["n"]) for row in skipped] == [("pairs", 4096)]
    assert "0.0977 GiB are free" in skipped[0]["why"]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_the_power(power):
    rows = exact("it", power)
    assert exponent(rows) == pytest.approx(power)
    assert exponent(rows, "peak_mib") == pytest.approx(1)
    rows[0]["median_ms"] *= 100  # 256 tokens: below the fit
    assert exponent(rows) == pytest.approx(power)


def test_no_exponent_of_fewer_than_two_lengths():
    assert math.isnan(exponent([]))
    assert math.isnan(exponent(exact("it", 1)[:2]))


def test_exponents_of_each_task_and_candidate():
    rows = exact("a", 1) + exact("b", 2) + exact("a", 0.5, "infer") + exact("b", 1.5, "infer")
    found = {(row["task"], row["candidate"]): row for row in exponents(rows)}
    assert {key: round(row["median_ms"], 6) for key, row in found.items()} == {
        ("infer", "a"): 0.5, ("infer", "b"): 1.5, ("train", "a"): 1, ("train", "b"): 2,
    }  # fmt: skip
    assert all(row["peak_mib"] == pytest.approx(1) for row in found.values())


def test_tables_show_ratios_exponents_and_what_was_not_run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows = exact("ours", 1) + exact("rival", 1.5) + exact("base", 2)
    for row in rows:
        if row["candidate"] == "rival":
            row["rival_of"] = "ours"
    skipped = [{"candidate": "huge", "n": 16384, "why": "needs about 9 GiB, 1 GiB are free"}]
    print_tables(rows, skipped, baseline="base", setting="cpu")
    text = capsys.readouterr().out
    training = text[text.index("forward + backward: time") :]
    training = training[: training.index("peak memory")]
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in training.splitlines()
        if line.startswith("│")
    }
    assert lines["ours"] == ["0.256", "1.02", "4.1", "16.4", "1.00", "0.00", ""]
    assert lines["rival"][4:] == ["1.50", "0.01", "128.00"]  # 16,384 to the power of a half
    assert lines["base"][4:] == ["2.00", "", ""]
    assert lines["huge"][3] == "not run"
    assert "huge not run at 16,384 tokens: needs about 9 GiB" in text


def test_the_plot_draws_every_candidate_and_a_rival_like_its_kind(tmp_path):
    rows = exact("ours", 1) + exact("rival", 1.5) + exact("base", 2)
    for row in rows:
        if row["candidate"] == "rival":
            row["rival_of"] = "ours"
    rows += [{**row, "task": "infer"} for row in rows]
    plot(rows, tmp_path / "some.png", baseline="base")
    plot([row for row in rows if row["candidate"] == "ours"], tmp_path / "one.png")
    assert (tmp_path / "some.png").stat().st_size > (tmp_path / "one.png").stat().st_size > 10_000
    styles = scaling._styles(rows, "base")
    assert styles["rival"]["color"] == styles["ours"]["color"] != styles["base"]["color"]
    assert (styles["ours"]["linestyle"], styles["rival"]["linestyle"]) == ("-", "--")
