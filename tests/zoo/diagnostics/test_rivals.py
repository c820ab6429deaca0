from __future__ import annotations

import pytest
import torch

from zoo.diagnostics.rivals import RIVALS, SDPA, rival
from zoo.layers import create_attention


def test_torch_by_hand_does_the_work_of_full_attention():
    theirs, ours = rival(SDPA, 7, 12, 3), create_attention("full", 12, 3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(theirs(x), ours(x))


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_takes_the_tokens_it_was_built_for(name):
    try:
        layer = rival(name, 300, 96, 3)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
    assert layer(torch.randn(1, 300, 96)).shape == (1, 300, 96)
