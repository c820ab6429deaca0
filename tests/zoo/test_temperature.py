from __future__ import annotations

import pytest
import torch

from zoo.layers import SelfAttention, set_temperature
from zoo.temperature import temperature_schedule


def test_numbers_and_learned_need_no_schedule():
    assert temperature_schedule("1") == (1.0, None)
    assert temperature_schedule("0.25") == (0.25, None)
    assert temperature_schedule("learned") == ("learned", None)


def test_a_course_is_geometric_from_start_to_end():
    end, schedule = temperature_schedule("2:0.5")
    assert end == 0.5
    attn = SelfAttention(8, 2)
    seen = []
    for progress in (0.0, 0.5, 1.0):
        schedule(attn, progress)
        seen.append(attn.temperature)
    assert seen == pytest.approx([2.0, 1.0, 0.5])


@pytest.mark.parametrize("text", ["", "hot", "2:", "1:2:3", "0", "-1", "2:0", "nan"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="temperature"):
        temperature_schedule(text)


def test_what_cannot_be_set_is_said():
    with pytest.raises(ValueError, match="Linear has no attention"):
        set_temperature(torch.nn.Linear(2, 2), 1.0)
    with pytest.raises(ValueError, match="learns its temperature"):
        set_temperature(SelfAttention(8, 2, temperature="learned"), 1.0)
