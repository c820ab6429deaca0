from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from zoo.engine import loop
from zoo.engine.checkpoint import load_checkpoint
from zoo.engine.loop import NonFiniteError, fit, trainable_parameters
from zoo.engine.optim import adamw
from zoo.engine.options import TrainOptions
from zoo.engine.run import start_run
from zoo.engine.tracking import read_rows
from zoo.freezing import freeze_by_rule

N = 26
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = X @ torch.arange(6.0) / 4


class Points:
    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return N

    def __getitems__(self, keys):
        ids = torch.tensor([i for _, i in keys])
        y = Y[ids].clone()
        if self.bad is not None:
            y[ids == self.bad] = math.nan
        return {"x": X[ids], "y": y, "ids": ids}


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1))


def step_fn(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


def evaluate_fn(model):
    was = model.training
    model.eval()
    with torch.no_grad():
        error = float(((model(X)[:, 0] - Y) ** 2).mean())
    model.train(was)
    return {"val/top1": -error}


def save_model(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "weights.pt")


def options(tmp_path, **changes) -> TrainOptions:
    base = TrainOptions(
        out=str(tmp_path / "run"), epochs=3, batch_size=4, lr=0.01, warmup_epochs=1, log_every=1
    )
    return replace(base, **changes)


def train(
    opts: TrainOptions,
    model: nn.Module | None = None,
    source=None,
    step=step_fn,
    evaluate=evaluate_fn,
    after=None,
):
    run = start_run("recipes/toy.py", opts)
    model = model or make_model(0.3)
    summary = fit(
        run,
        model,
        step,
        source or Points(),
        evaluate,
        after_update=after and after(run),
        save_model=save_model,
    )
    return run, model, summary


def rows(run, name):
    return [row[name] for row in read_rows(run.folder / "metrics.jsonl") if name in row]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_learning_rate_curve_per_update(tmp_path, accumulation):
    """Case E1: the warm-up ends where it should and the minimum is the last update."""
    run, _, summary = train(options(tmp_path, grad_accumulation=accumulation, min_lr=0.001))
    curve = rows(run, "train/lr")
    per_epoch = math.ceil(N / (4 * accumulation))
    assert len(curve) == summary["steps"] == 3 * per_epoch
    assert curve.index(max(curve)) == per_epoch
    assert curve[-1] == pytest.approx(0.001)
    assert min(curve[per_epoch:-1]) > 0.001


def test_accumulated_gradient_is_the_mean_over_the_samples_seen(tmp_path, monkeypatch):
    """Case E2: 7 batches of 4 (the last of 2), 4 per update: 16 and 10 samples."""
    seen = []
    original = loop._gradient_norm

    def spy(training):
        seen.append([p.grad.clone() for p in training.model.parameters()])
        return original(training)

    monkeypatch.setattr(loop, "_gradient_norm", spy)
    opts = options(tmp_path, epochs=1, grad_accumulation=4, lr=0.0, clip_grad=None)
    model = nn.Linear(6, 1)
    run = start_run("toy.py", opts)
    fit(run, model, step_fn, Points(), evaluate_fn, save_model=save_model)
    plan = loop.BatchPlan(N, 4, grad_accumulation=4, seed=0)
    for grads, window in zip(seen, plan.windows(0), strict=True):
        ids = torch.tensor([i for micro in window for i in micro.ids])
        loss = step_fn(model, {"x": X[ids], "y": Y[ids]})
        for grad, expected in zip(
            grads, torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(grad, expected)
    assert len(seen) == 2


def test_clipped_once_on_the_summed_gradient(tmp_path, monkeypatch):
    """Case E4."""
    norms = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run, _, _ = train(options(tmp_path, epochs=1, grad_accumulation=4, clip_grad=0.1))
    assert norms == [pytest.approx(0.1, rel=1e-3)] * 2
    assert all(norm > 0.1 for norm in rows(run, "train/grad_norm")), "the log has the norm before"


class Stop(Exception):
    pass


def stop_at(step: int, how: str = "kill"):
    """A step_fn that dies, or asks to stop as Ctrl-C does, at its n-th call."""
    calls = 0

    def step_and_stop(model, batch):
        nonlocal calls
        calls += 1
        if calls == step:
            raise Stop
        return step_fn(model, batch)

    return step_and_stop


@pytest.mark.parametrize("at", [2, 9, 10, 15])
@pytest.mark.parametrize(
    "changes", [{}, {"ema": True, "grad_accumulation": 2, "checkpoint_every": 2}]
)
def test_resuming_gives_the_same_weights_bit_for_bit(tmp_path, at, changes):
    """Cases E5, E7: after a crash at any step, with dropout, BatchNorm, EMA and accumulation."""
    whole, _, _ = train(options(tmp_path / "a", **changes))
    broken = options(tmp_path / "b", **changes)
    with pytest.raises(Stop):
        train(broken, step=stop_at(at))
    resumed, _, summary = train(replace(broken, resume="auto"), model=make_model(0.3))
    first = torch.load(whole.folder / "model/weights.pt")
    second = torch.load(resumed.folder / "model/weights.pt")
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("train/loss", "train/lr", "train/grad_norm", "val/top1", "train/epoch_loss"):
        assert rows(whole, name) == rows(resumed, name), name
    steps = [row["step"] for row in read_rows(resumed.folder / "metrics.jsonl")]
    assert steps == sorted(steps)
    assert summary["status"] == "completed"


def test_a_signal_saves_in_the_middle_of_an_epoch(tmp_path, capsys):
    import os
    import signal

    seen: list[list[int]] = []

    def recorder(stop: int | None):
        def record(model, batch):
            seen.append(batch["ids"].tolist())
            if len(seen) == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return step_fn(model, batch)

        return record

    opts = options(tmp_path)
    with pytest.raises(SystemExit) as info:
        train(opts, step=recorder(10))
    assert info.value.code == 143
    assert "--resume auto" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["epochs"]) == ("interrupted", 10, 1)
    state = load_checkpoint(tmp_path / "run/checkpoints/step_00000010.pt")
    assert (state["position"]["epoch"], state["position"]["update"]) == (1, 3)
    train(replace(opts, resume="auto"), step=recorder(None))
    whole = [i for epoch in range(3) for i in loop.BatchPlan(N, 4, seed=0).order(epoch)]
    assert [i for ids in seen for i in ids] == whole, "each id once per epoch, in the same order"


def test_a_signal_during_evaluation_repeats_the_evaluation(tmp_path):
    import signal

    calls = 0

    def evaluate(model):
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
            return None
        return evaluate_fn(model)

    opts = options(tmp_path)
    with pytest.raises(SystemExit) as info:
        train(opts, evaluate=evaluate)
    assert info.value.code == 130
    run, _, summary = train(replace(opts, resume="auto"), evaluate=evaluate)
    assert len(rows(run, "val/top1")) == 3
    assert summary["steps"] == 21


def test_numbers_of_after_update_are_logged_at_their_step(tmp_path):
    def after(run):
        return lambda model, step: {"attn/x": step / 2} if step % 5 == 0 else None

    run, _, _ = train(options(tmp_path), after=after)
    found = [row for row in read_rows(run.folder / "metrics.jsonl") if "attn/x" in row]
    assert [(row["step"], row["attn/x"]) for row in found] == [
        (5, 2.5),
        (10, 5),
        (15, 7.5),
        (20, 10),
    ]
    assert [row["epoch"] for row in found] == pytest.approx([n / 7 for n in (5, 10, 15, 20)])
    plain, _, _ = train(options(tmp_path / "plain"))
    for name in ("train/loss", "train/grad_norm", "val/top1"):
        assert rows(run, name) == rows(plain, name)


@pytest.mark.parametrize("at", [3, 7, 10])
def test_asked_to_stop_it_saves_tells_why_and_goes_on_bit_for_bit(tmp_path, capsys, at):
    """Within an epoch, and at its last update, whose evaluation is then left for later."""
    whole, _, _ = train(options(tmp_path / "whole"))

    def after(run):
        return lambda model, step: run.stop("alarm") if step == at else None

    opts = options(tmp_path)
    with pytest.raises(SystemExit) as info:
        train(opts, after=after)
    assert info.value.code == 3
    told = capsys.readouterr().out
    assert "stopped by alarm at step" in told
    assert "--resume auto" in told
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert found["status"] == "stopped by alarm"
    assert found["steps"] in (at, at + 1)
    run, _, summary = train(replace(opts, resume="auto"), after=after)
    assert summary["status"] == "completed"
    first, second = (torch.load(r.folder / "model/weights.pt") for r in (whole, run))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert rows(run, "val/top1") == rows(whole, "val/top1")


def test_the_last_loss_and_norm_are_known_after_an_update(tmp_path):
    seen = []

    def after(run):
        return lambda model, step: seen.append(dict(run.last))

    run, _, _ = train(options(tmp_path, epochs=1), after=after)
    assert [each["loss"] for each in seen] == rows(run, "train/loss")
    assert [each["grad_norm"] for each in seen] == rows(run, "train/grad_norm")


def test_looking_may_differ_on_resuming(tmp_path):
    opts = options(tmp_path, epochs=1)
    train(opts)
    train(replace(opts, resume="auto", save_attention_every=5, stop_on_alarm=True))
    with pytest.raises(ValueError, match="stop_on_alarm needs looks"):
        options(tmp_path, stop_on_alarm=True)
    with pytest.raises(ValueError, match=r"save_attention_every \(-1\) must be at least 0"):
        options(tmp_path, save_attention_every=-1)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_stops_and_names_step_rate_and_checkpoint(tmp_path, where):
    def bad_gradient(model, batch):
        loss = step_fn(model, batch)
        return loss + (loss * 0 / 0 if where == "loss" else torch.sqrt(loss * 0) * 1e-3)

    calls = 0

    def late(model, batch):
        nonlocal calls
        calls += 1
        return (bad_gradient if calls == 10 else step_fn)(model, batch)

    model = make_model()
    with pytest.raises(NonFiniteError, match=r"step 10 .*learning rate 0\.0\d+") as info:
        train(options(tmp_path), model=model, step=late)
    assert "step_00000007.pt" in str(info.value)
    assert all(p.isfinite().all() for p in model.parameters()), (
        "found before the weights are touched"
    )
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_nan_in_the_data_stops_at_once(tmp_path):
    with pytest.raises(NonFiniteError, match="No checkpoint was saved before"):
        train(options(tmp_path), source=Points(bad=loop.BatchPlan(N, 4, seed=0).order(0)[5]))


def test_a_run_is_never_overwritten_nor_continued_under_other_options(tmp_path):
    opts = options(tmp_path, epochs=2)
    train(opts)
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(FileExistsError, match="--resume auto"):
        train(opts)
    with pytest.raises(ValueError, match=r"lr: 0.01 -> 0.02"):
        train(replace(opts, lr=0.02, resume="auto"))
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before
    _, _, summary = train(replace(opts, resume="auto", log_every=5, keep=9))
    assert summary["status"] == "completed"
    assert (
        summary["metrics"]["val/top1"] == summary["best"]["val/top1"]
        or summary["best"]["epoch"] == 1
    )


def test_resume_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(ValueError, match="needs --out"):
        start_run("toy.py", TrainOptions(resume="auto"))
    with pytest.raises(RuntimeError, match="no checkpoint"):
        start_run("toy.py", TrainOptions(resume=str(tmp_path / "none")))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        start_run("toy.py", options(tmp_path, resume="auto"))
    start_run("toy.py", TrainOptions(out=str(tmp_path / "new"), resume="auto"))
    assert "starting from the beginning" in capsys.readouterr().err
    assert not (tmp_path / "new").exists(), "nothing is made before training can start"


def test_tensorboard_and_config(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _, summary = train(options(tmp_path, tracker="tensorboard", epochs=2))
    events = EventAccumulator(str(run.folder / "toy")).Reload()
    logged = [(e.step, e.value) for e in events.Scalars("val/top1")]
    assert [step for step, _ in logged] == [7, 14]
    assert logged[-1][1] == pytest.approx(summary["metrics"]["val/top1"], rel=1e-5)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["options"]["epochs"] == 2
    assert config["versions"]["torch"] == torch.__version__
    assert config["hardware"]["processes"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, r"epochs \(0\) must be at least 1"),
        ({"lr": -1.0}, r"lr \(-1.0\)"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"warmup_epochs": 9}, "warmup_epochs"),
        ({"clip_grad": 0.0}, r"clip_grad \(0.0\) must be positive"),
        ({"layer_decay": 1.5}, "layer_decay"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"keep": 0}, "keep"),
    ],
)
def test_options_are_checked(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        options(tmp_path, **change)


def test_one_process_at_a_time_writes_into_a_run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.engine.run.LOCK_SECONDS", 0.3)
    first = start_run("toy.py", options(tmp_path))
    first.open()
    second = start_run("toy.py", options(tmp_path, resume="auto"))
    with pytest.raises(FileExistsError, match="another process is training"):
        second.open()


def test_resuming_the_best_checkpoint_rewinds_the_run(tmp_path):
    best_first = iter([3.0, 1.0, 2.0])
    run, _, _ = train(options(tmp_path), evaluate=lambda _: {"val/top1": next(best_first)})
    whole = read_rows(run.folder / "metrics.jsonl")
    weights = torch.load(run.folder / "model/weights.pt")
    again = TrainOptions(**{**options(tmp_path).to_json(), "out": None})
    rest = iter([1.0, 2.0])
    train(
        replace(again, resume=str(run.folder / "checkpoints/best.pt")),
        evaluate=lambda _: {"val/top1": next(rest)},
    )
    names = sorted(p.name for p in (run.folder / "checkpoints").iterdir())
    assert names == ["best.pt", "step_00000014.pt", "step_00000021.pt"]
    assert all(
        torch.equal(weights[k], v) for k, v in torch.load(run.folder / "model/weights.pt").items()
    )
    timing = "train/samples_per_second"
    strip = [{k: v for k, v in row.items() if k != timing} for row in whole]
    assert strip == [
        {k: v for k, v in row.items() if k != timing}
        for row in read_rows(run.folder / "metrics.jsonl")
    ]


def test_a_checkpoint_outside_a_run_is_not_resumed(tmp_path):
    run, _, _ = train(options(tmp_path, epochs=1))
    stray = tmp_path / "stray.pt"
    stray.write_bytes((run.folder / "checkpoints/best.pt").read_bytes())
    with pytest.raises(RuntimeError, match="--pretrained file:"):
        start_run("toy.py", TrainOptions(resume=str(stray)))
    (run.folder / "config.json").unlink()
    with pytest.raises(RuntimeError, match=r"config\.json is missing"):
        start_run("toy.py", options(tmp_path, epochs=1, resume="auto")).open()


def test_rows_of_an_epoch_that_will_be_evaluated_again_are_dropped(tmp_path):
    from zoo.engine.tracking import Tracking

    run = start_run("toy.py", options(tmp_path))
    run.open()
    tracking = Tracking(run.accelerator, run.folder)
    tracking.log({"train/loss": 1.0}, step=7, epoch=1.0)
    tracking.log({"train/epoch_loss": 1.0, "val/top1": 1.0}, step=7, epoch=1)
    Tracking(run.accelerator, run.folder, step=7, epoch=0)
    assert rows(run, "train/loss") == [1.0]
    assert rows(run, "val/top1") == []


class Probe(nn.Module):
    """A body to freeze, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Sigmoid())
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.blocks(x)))

    def get_classifier(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("ema", [False, True])
def test_what_is_frozen_stays_bit_for_bit_and_is_saved(tmp_path, ema, capsys):
    """Weights under decay, running statistics and their average; the count is told and kept."""
    model = Probe()
    freeze_by_rule(model, "backbone")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    opts = options(tmp_path, weight_decay=0.5, ema=ema)
    run, _, summary = train(opts, model=model)
    assert (summary["trainable_params"], summary["params"]) == (9, 9 + 7 * 8 + 16)
    assert "training 9 of 81 parameters in" in capsys.readouterr().out
    stored = load_checkpoint(sorted((run.folder / "checkpoints").glob("step*"))[-1])
    states = [model.state_dict(), torch.load(run.folder / "model/weights.pt"), stored["model"]]
    if ema:
        average = {key.removeprefix("module."): value for key, value in stored["ema"].items()}
        states.append(average)
    for state in states:
        changed = {key for key in before if not torch.equal(state[key], before[key])}
        assert changed == {"head.weight", "head.bias"}


def test_everything_that_learns_is_not_counted_aloud(tmp_path, capsys):
    _, model, summary = train(options(tmp_path, epochs=1))
    assert summary["trainable_params"] == summary["params"] == 81
    assert trainable_parameters(model) == (81, 81)
    assert " parameters in" not in capsys.readouterr().out


def test_the_rate_of_the_head_follows_the_same_curve(tmp_path, monkeypatch):
    """Warm-up and cosine; the metrics tell the rate of the rest."""
    optimizers, rates, model = [], [], Probe()

    def watched(*args, **kwargs):
        optimizers.append(adamw(*args, **kwargs))
        return optimizers[-1]

    def after_update(bare, step):
        head = model.head.weight
        for group in optimizers[0].param_groups:
            if any(p is head for p in group["params"]):
                rates.append(group["lr"])

    monkeypatch.setattr(loop, "adamw", watched)
    run = start_run("recipes/toy.py", options(tmp_path))
    hooks = {"after_update": after_update, "save_model": save_model}
    fit(run, model, step_fn, Points(), evaluate_fn, head_lr=0.05, **hooks)
    rest = rows(run, "train/lr")
    assert len(rates) == len(rest) == 21
    assert max(rest) == 0.01
    assert rates == pytest.approx([5 * rate for rate in rest])


def test_a_model_without_gradient_checkpointing_is_said(tmp_path):
    with pytest.raises(ValueError, match="toy has no gradient checkpointing: drop grad_check"):
        train(options(tmp_path, grad_checkpointing=True, model="toy"))
    assert not (tmp_path / "run").exists()
