"""When an alarm is given, and what it says. That the limits fit is tested in trainings."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from made_looks import EVEN, OPEN, B, H, N, look, one_key
from torch import Tensor

from zoo.diagnostics.alarm_rules import RULES, Moment, find
from zoo.diagnostics.alarms import Alarm, Alarms, blocks


def varied(seed: int = 0, sharpness: float = 2.0) -> Tensor:
    """Weights as healthy ones are: heads differ, queries too."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(B, H, N, N, generator=draw) * sharpness).softmax(-1)


ALIKE = look(varied()[:, :1].expand(B, H, N, N))
SINK = look(one_key(0.9))
SHARP = look(one_key(0.97, torch.arange(N)))
HEALTHY = look(varied())


def kinds(**given) -> list[str]:
    return [finding.kind for finding in find(Moment(**{"progress": 0.8, **given}))]


@pytest.mark.parametrize(
    ("seen", "kind"),
    [(EVEN, "uniform"), (SINK, "collapse"), (ALIKE, "alike_heads"), (SHARP, "stiff")],
)
def test_each_fault_of_a_layer_is_named(seen, kind):
    assert kind in kinds(layers={"a": seen})
    assert not kinds(layers={"a": HEALTHY})


def test_a_start_is_even_and_no_fault():
    """Of a fresh model all heads look everywhere alike, and so like one another."""
    assert not kinds(progress=0.2, layers={"a": EVEN})
    assert not kinds(progress=0.2, layers={"a": ALIKE})
    assert not kinds(updates=30, layers={"a": EVEN}), "whatever share of a run that is"
    assert kinds(updates=60, layers={"a": EVEN}) == ["uniform"]
    assert kinds(layers={"a": EVEN}) == ["uniform"], "even heads are alike, which is said once"


def test_one_head_alone_may_be_even_or_a_sink():
    mixed = varied()
    mixed[:, 0] = 1 / N
    mixed[:, 1] = one_key(0.94)[:, 1]
    assert not kinds(layers={"a": look(mixed)})


def test_two_heads_may_be_alike():
    assert not kinds(layers={"a": look(varied()[:, :1].expand(B, 2, N, N))})


def test_too_few_keys_tell_nothing():
    pairs = torch.eye(2).expand(1, 2, 2, 2)
    assert not kinds(layers={"a": look(pairs)})
    single = one_key(0.9)[:, :, :1]
    assert "collapse" not in kinds(layers={"a": look(single)}), "one query is no majority"


@pytest.mark.parametrize(
    ("gates", "kind"),
    [
        (replace(OPEN, dead=0.5), "dead_gates"),
        (replace(OPEN, saturated=0.96, sample_spread=0.001), "saturated_gates"),
        (replace(OPEN, saturated=0.96), None),  # follows the sample
        (replace(OPEN, dead=math.nan, saturated=math.nan), None),  # of no known range
        (replace(OPEN, mean=math.nan), "not_finite"),
    ],
)
def test_faults_of_gates(gates, kind):
    assert kinds(gates={"a": gates}) == ([kind] if kind else [])
    assert kinds(progress=0.0, gates={"a": gates}) == ([kind] if kind == "not_finite" else [])


def test_scores_count_once_they_have_grown():
    alarms, fine_tuned = Alarms(100), Alarms(100)
    given = [5.0, 90.0, 130.0, 130.0]
    found = [alarms.check(10 * i, {"a": look(varied(), s)}) for i, s in enumerate(given)]
    assert [len(new) for new in found] == [0, 0, 0, 1]
    assert (found[-1][0].kind, found[-1][0].value) == ("large_logits", 130)
    for step in range(5):  # large from the start, as in models that trained well
        assert not fine_tuned.check(step, {"a": look(varied(), 313.0)})
    assert "large_logits" in kinds(layers={"a": look(varied(), 1001.0)})


@pytest.mark.parametrize(("dtype", "score"), [(torch.float32, 1e4), (torch.float16, 1e4)])
def test_scores_that_will_overflow(dtype, score):
    assert "nan_ahead" in kinds(dtype=dtype, layers={"a": look(varied(), score)})
    assert "nan_ahead" not in kinds(dtype=dtype, layers={"a": look(varied(), score * 0.99)})


def test_numbers_of_training_that_run_away():
    normal = [{"loss": 2.3, "grad_norm": 1.0}] * 3
    for last, expected in (
        ({"loss": 2.5, "grad_norm": 4.0}, []),
        ({"loss": 4.5, "grad_norm": 4.0}, ["nan_ahead"]),
        ({"loss": 2.3, "grad_norm": 60.0}, ["nan_ahead"]),
        ({"loss": math.nan, "grad_norm": 1.0}, ["not_finite"]),
        ({"loss": 2.3, "grad_norm": math.inf}, ["not_finite"]),
        ({}, []),
    ):
        assert kinds(training=[*normal, last]) == expected, last
    overflow = [*normal, {"loss": 2.3, "grad_norm": math.inf}]
    assert not kinds(dtype=torch.float16, training=overflow), "loss scaling searches so"


def test_a_modality_that_draws_all():
    assert kinds(shares={"a": {"text": 0.004, "image": 0.996}}) == ["dominant_modality"]
    assert not kinds(shares={"a": {"text": 0.1, "image": 0.9}})
    assert not kinds(shares={"a": {"image": 1.0}}), "there is no other"


def test_an_alarm_needs_two_looks_in_a_row_and_comes_once():
    alarms = Alarms(100)
    seen = [EVEN, HEALTHY, EVEN, EVEN, EVEN, HEALTHY, EVEN, EVEN]
    found = [alarms.check(60 + i, {"a": each}) for i, each in enumerate(seen)]
    assert [len(new) for new in found] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert (found[3][0].step, found[3][0].layer, found[3][0].head) == (63, "a", None)


def test_what_is_not_finite_is_told_at_once():
    broken = varied()
    broken[0, 0, 0] = math.nan
    (alarm,) = Alarms(100).check(1, {"a": look(broken), "b": HEALTHY})
    assert (alarm.kind, alarm.layer) == ("not_finite", "a")
    (alarm,) = Alarms(100).check(1, training={"loss": math.inf})
    assert alarm.layer == ""
    assert "loss is inf" in alarm.message


def test_heads_of_a_layer_make_one_alarm_and_later_ones_none():
    sharp, first = one_key(0.97, torch.arange(N)), varied()
    first[:, 1] = sharp[:, 1]
    alarms, all_heads = Alarms(100), Alarms(100)
    alarms.check(20, {"a": look(first)})
    (one,) = alarms.check(21, {"a": look(first)})
    assert (one.kind, one.head) == ("stiff", 1)
    assert "a, head 1:" in one.message
    for step in range(22, 26):
        assert not alarms.check(step, {"a": look(sharp)})
    all_heads.check(22, {"a": look(sharp)})
    (together,) = all_heads.check(23, {"a": look(sharp)})
    assert together.head is None
    assert "heads 0, 1, 2:" in together.message


def test_a_resumed_run_tells_nothing_twice():
    alarms, resumed, fresh = Alarms(100), Alarms(100), Alarms(100)
    alarms.check(60, {"a": EVEN, "b": HEALTHY})
    rows = [json.loads(json.dumps(a.to_json())) for a in alarms.check(61, {"a": EVEN, "b": EVEN})]
    resumed.restore(rows)
    for each in (resumed, fresh):  # what the run had seen before its checkpoint
        each.check(61, {"a": EVEN, "b": EVEN})
    found = [{a.layer for a in each.check(62, {"a": EVEN, "b": EVEN})} for each in (resumed, fresh)]
    assert found == [{"b"}, {"a", "b"}]


def every_alarm() -> list[Alarm]:
    broken = varied()
    broken[0, 0, 0] = math.nan
    layers = {"even": EVEN, "sink": SINK, "alike": ALIKE, "sharp": SHARP, "broken": look(broken)}
    layers["large"] = look(varied(), 2e4)
    gates = {
        "shut": replace(OPEN, dead=0.7),
        "open": replace(OPEN, saturated=1.0, sample_spread=0.0),
    }
    shares = {"both": {"text": 0.0, "image": 1.0}}
    alarms = Alarms(100, attention_dropout=0.5)
    given = (layers, gates, shares, {"loss": 1.0})
    return [*alarms.check(80, *given), *alarms.check(90, *given)]


def test_every_kind_reads_well_and_survives_json():
    found = every_alarm()
    assert {alarm.kind for alarm in found} == set(RULES)
    for alarm in found:
        text = str(alarm)
        assert text.startswith(f"step {alarm.step}: {alarm.layer}")
        assert text.count("\n") <= 3
        assert alarm.causes
        assert alarm.remedies
        row = json.loads(json.dumps(alarm.to_json(), allow_nan=False))
        again = Alarm.from_json(row)
        assert again == alarm or math.isnan(alarm.value)
        assert str(again) == text
        assert again.to_json() == alarm.to_json()


def twice(alarms: Alarms, step: int = 80, **seen) -> list[Alarm]:
    return [*alarms.check(step, **seen), *alarms.check(step, **seen)]


def test_a_trained_model_is_not_told_of_a_run():
    (alarm,) = twice(Alarms(1), 1, layers={"a": EVEN})
    assert "of the run" not in alarm.message
    assert "untrained" in alarm.causes[0]
    (alarm,) = twice(Alarms(1), 1, layers={"a": EVEN, "b": HEALTHY})
    assert not any("untrained" in cause for cause in alarm.causes)
    (alarm,) = twice(Alarms(100), layers={"a": EVEN})
    assert alarm.message.endswith("past half of the run")
    assert not any("untrained" in cause for cause in alarm.causes)


def test_blocks_say_once_what_is_true_of_several_layers():
    layers = {name: look(varied(), 2e4) for name in "abc"}
    layers["d"] = look(varied(), 2e3)
    found = twice(Alarms(100), layers=layers, training={"loss": 1.0})
    assert [alarm.kind for alarm in found] == ["large_logits"] * 4 + ["nan_ahead"] * 3
    large, ahead = blocks(found)
    assert large == str(found[3]), "of the others nan_ahead says it"
    assert "2e+04" in ahead
    assert "; and 2 more layers: b, c\n" in ahead
    assert ahead.count("likely:") == ahead.count("try:") == 1
    assert blocks(found[:1]) == [str(found[0])]
    assert blocks([]) == []


def test_blocks_keep_apart_what_differs():
    shares = {"a": {"text": 0.0, "image": 1.0}, "b": {"text": 1.0, "image": 0.0}}
    assert len(blocks(twice(Alarms(100), shares=shares))) == 2
    many = {f"layer{i}": EVEN for i in range(30)}
    (text,) = blocks(twice(Alarms(100), layers=many))
    assert "and 29 more layers: layer1, " in text
    assert "layer29" not in text


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"total_steps \(0\)"):
        Alarms(0)
    with pytest.raises(ValueError, match="attention_dropout"):
        Alarms(10, attention_dropout=1.5)
    with pytest.raises(TypeError, match=r"dtype .* must be a floating-point"):
        Alarms(10, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"step \(-1\)"):
        Alarms(10).check(-1)
