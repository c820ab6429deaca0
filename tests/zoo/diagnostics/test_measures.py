import math

import pytest
import torch
from scipy.stats import entropy as reference

from zoo.diagnostics import entropy


def test_the_entropy_equals_scipy():
    weights = torch.rand(2, 3, 4, 5).double().softmax(-1)
    torch.testing.assert_close(
        entropy(weights), torch.tensor(reference(weights.numpy(), axis=-1)).float()
    )


def test_it_lies_between_one_key_and_all_alike():
    one, alike = torch.eye(8)[None, None], torch.full((1, 1, 8, 8), 1 / 8)
    assert entropy(one).abs().max() == 0
    torch.testing.assert_close(entropy(alike), torch.full((1, 1, 8), math.log(8)))
    torch.testing.assert_close(entropy(alike, normalized=True), torch.ones(1, 1, 8))


def test_a_query_without_weight_has_none():
    assert entropy(torch.zeros(1, 1, 2, 4), normalized=True).tolist() == [[[0.0, 0.0]]]


def test_one_key_cannot_be_normalised():
    with pytest.raises(ValueError, match=r"\(1, 1, 2, 1\) need 2 keys"):
        entropy(torch.ones(1, 1, 2, 1), normalized=True)
