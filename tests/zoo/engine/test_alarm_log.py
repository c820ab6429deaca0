"""Alarms of a run: told once, kept, dropped and given again where a run goes on from before."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from zoo.diagnostics.looks import look_at_layer
from zoo.engine.alarm_log import AlarmLog, attention_dropout, watch_options
from zoo.engine.options import TrainOptions
from zoo.engine.run import start_run
from zoo.engine.tracking import read_rows


def run_in(tmp_path, **options):
    (tmp_path / "run").mkdir(exist_ok=True)
    run = start_run("toy.py", TrainOptions(batch_size=10, epochs=10, **options))
    run.folder = tmp_path / "run"
    return run


def looks(bad: bool = False):
    """A layer whose heads attend to one key, whatever the query, or evenly."""
    weights = torch.full((2, 2, 6, 6), 1 / 6)
    if bad:
        weights[:] = math.nan
    return {"a.attn": look_at_layer(weights)}


def one_key():
    weights = torch.zeros(2, 2, 6, 6)
    weights[..., 3] = 1
    return {"a.attn": look_at_layer(weights)}


def test_an_alarm_is_told_once_and_kept(tmp_path, capsys):
    run = run_in(tmp_path)
    log = AlarmLog(run, 100)
    log.resume(0)
    for step in (10, 20, 30):
        log(step, layers=looks(bad=True))
    rows = read_rows(tmp_path / "run/alarms.jsonl")
    kinds = [(row["kind"], row["step"]) for row in rows]
    assert kinds.count(("not_finite", 10)) == 1
    assert len(set(kinds)) == len(kinds) == len({kind for kind, _ in kinds})
    err = capsys.readouterr().err
    assert err.count("alarm at step 10") == 1
    assert not run.stopping()


def test_a_healthy_look_leaves_nothing(tmp_path, capsys):
    log = AlarmLog(run_in(tmp_path), 100)
    log.resume(0)
    log(1, layers=looks())
    assert not (tmp_path / "run/alarms.jsonl").exists()
    assert not capsys.readouterr().err


def test_it_stops_the_run_where_asked(tmp_path):
    run = run_in(tmp_path, save_attention_every=1, stop_on_alarm=True)
    log = AlarmLog(run, 100)
    log(10, layers=looks(bad=True))
    assert (run.stopping(), run.status, run.exit_code) == (True, "stopped by alarm", 3)


def test_layers_are_printed_together_and_kept_apart(tmp_path, capsys):
    log = AlarmLog(run_in(tmp_path), 100)
    log(10, layers={name: looks(bad=True)["a.attn"] for name in ("a", "b", "c")})
    rows = read_rows(tmp_path / "run/alarms.jsonl")
    assert [row["layer"] for row in rows] == ["a", "b", "c"]
    err = capsys.readouterr().err
    assert err.count("alarm at") == err.count("likely:") == 1
    assert "; and 2 more layers: b, c" in err


def test_advice_follows_the_options(tmp_path):
    """Updates are clipped by default, this recipe has no --qk-norm, and 1 is no usual rate."""
    for name, options, first in (
        ("usual", {}, "a lower --lr or a longer --warmup-epochs"),
        ("high", {"lr": 1.0}, "--lr 0.001"),
    ):
        (tmp_path / name).mkdir()
        log = AlarmLog(run_in(tmp_path / name, **options), 100)
        log(10, layers=looks(bad=True))
        assert read_rows(log.path)[0]["remedies"] == [first]


@pytest.mark.parametrize("cut", [20, 50, 55, 60, 80])
def test_a_resumed_run_gives_the_alarms_of_an_uninterrupted_one(tmp_path, cut):
    """Those that need two looks come at the same step, wherever the run was cut between."""

    def watched(log, steps):
        for step in steps:
            log(step, layers=looks() if step < 50 else one_key())

    (tmp_path / "whole").mkdir()
    whole = AlarmLog(run_in(tmp_path / "whole"), 100)
    whole.resume(0)
    steps = range(10, 101, 10)
    watched(whole, steps)
    wanted = read_rows(whole.path)
    assert 50 < wanted[0]["step"] < 80
    first = AlarmLog(run_in(tmp_path), 100)
    first.resume(0)
    watched(first, steps)  # on, after the checkpoint that is gone back to
    again = AlarmLog(run_in(tmp_path), 100)
    done = [step for step in steps if step <= cut]
    again.resume(cut, [(n, {"layers": looks() if n < 50 else one_key()}) for n in done])
    assert all(row["step"] <= cut for row in read_rows(again.path))
    watched(again, [step for step in steps if step > cut])
    assert read_rows(again.path) == wanted


def test_what_it_takes_from_the_run(tmp_path):
    run = run_in(tmp_path, grad_accumulation=2, save_attention_every=7)
    log = AlarmLog(run, 101, attention_dropout=0.5)
    assert log.alarms.total_steps == 10 * 6
    assert log.alarms.attention_dropout == 0.5
    assert log.training == {}
    run.last = {"loss": 1.0, "grad_norm": 2.0}
    assert log.training == run.last
    options = watch_options(run, nn.Linear(1, 1), 101)
    assert (options["every"], options["main"], options["step"]) == (7, True, 0)
    assert options["folder"] == run.folder / "attention"


def test_attention_dropout_by_any_name():
    class Timm(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.attn_drop = nn.Dropout(rate)

    assert attention_dropout(nn.Linear(1, 1)) == 0
    assert attention_dropout(nn.Sequential(Timm(0.1), Timm(0.3))) == 0.3
    assert attention_dropout(nn.MultiheadAttention(4, 2, dropout=0.4)) == 0.4


def test_rows_are_json_that_any_program_reads(tmp_path):
    log = AlarmLog(run_in(tmp_path), 100)
    log(10, layers=looks(bad=True))
    for line in (tmp_path / "run/alarms.jsonl").read_text().splitlines():
        row = json.loads(line, parse_constant=pytest.fail)
        assert {"kind", "step", "layer", "message"} <= row.keys()
