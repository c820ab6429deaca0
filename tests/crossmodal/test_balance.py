"""What is measured of a fusion's attention, against sums over single pairs without padding."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

import zoo
from crossmodal.balance import attention_balance, evenness, watched
from crossmodal.encoded import Encoded

LENGTHS = (7, 3, 5)


def matcher(**options):
    torch.manual_seed(0)
    given = {"text_tower": "text_bag", "tokenizer": "bytes", "img_size": 16, "gated": False}
    return zoo.create_model(
        "matcher_micro", **{**given, "fusion_layout": "merged", **options}
    ).eval()


def encoded(model, padding: int = 0) -> tuple[Encoded, Encoded]:
    """Three pairs with captions of several lengths; padding is noise."""
    draw = torch.Generator().manual_seed(1)
    words, cells = max(LENGTHS), math.prod(model.image_tower.grid)
    text = torch.randn(3, words, model.text_tower.num_features, generator=draw)
    image = torch.randn(3, cells, model.image_tower.num_features, generator=draw)
    noise = 100 * torch.randn(3, padding, text.shape[2])
    mask = torch.arange(words + padding) < torch.tensor(LENGTHS)[:, None]
    text = torch.cat([text, noise], dim=1)
    return Encoded(image, image.mean(1)), Encoded(text, text.mean(1), mask)


def of_single_pairs(model, image: Encoded, text: Encoded) -> tuple[float, float]:
    """Mean entropy over its most, and mean share on the image, by numpy and scipy."""
    even, share = [], []
    for sample, length in enumerate(LENGTHS):
        one = Encoded(image.tokens[sample : sample + 1], image.pooled[sample : sample + 1])
        tokens = text.tokens[sample : sample + 1, :length]
        with torch.no_grad(), zoo.capture_attention(model, "fusion.*") as records:
            model.match(one, Encoded(tokens, tokens.mean(1)))
        weights = np.stack([maps[0][0].double().numpy() for maps in records.values()])
        even += [(stats.entropy(weights, axis=-1) / np.log(weights.shape[-1])).mean((0, 1))]
        share += [weights[..., length:].sum(-1).mean((0, 1))]
    return float(np.concatenate(even).mean()), float(np.concatenate(share).mean())


@pytest.mark.parametrize("norm", ["per_modality", "none"])
@pytest.mark.parametrize("padding", [0, 4])
def test_padding_is_neither_query_nor_key(norm, padding):
    model = matcher(fusion_norm=norm, image_scale=3.0)
    image, text = encoded(model, padding)
    found = attention_balance(model, image, text)
    even, share = of_single_pairs(model, image, text)
    assert found["attn_entropy"] == pytest.approx(even, abs=1e-6)
    assert found["attn_image_share"] == pytest.approx(share, abs=1e-6)
    assert 0.1 < even < 0.9999
    assert 0.1 < share < 0.95


def test_weights_that_are_all_alike():
    model = matcher(fusion_attention="uniform")
    found = attention_balance(model, *encoded(model, padding=2))
    cells = math.prod(model.image_tower.grid)
    by_hand = sum(n * cells / (n + cells) for n in LENGTHS) / sum(LENGTHS)
    assert found["attn_entropy"] == pytest.approx(1, abs=1e-6)
    assert found["attn_image_share"] == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("norm", ["per_modality", "shared", "qk", "none"])
def test_only_without_a_norm_weights_know_the_scale_of_the_image(norm):
    found = []
    for scale in (10.0, 1000.0):  # where eps is nothing
        model = matcher(fusion_norm=norm, image_scale=scale, fusion_depth=1)
        found.append(attention_balance(model, *encoded(model)))
    small, large = found
    if norm == "none":
        assert large["attn_entropy"] < small["attn_entropy"] / 2
    else:
        assert large == pytest.approx(small, abs=2e-3)


@pytest.mark.parametrize("attention", ["full", "linformer"])
def test_cross_has_no_share(attention):
    model = matcher(fusion_layout="cross", fusion_attention=attention)
    found = attention_balance(model, *encoded(model))
    assert list(found) == ["attn_entropy"]
    assert 0.5 < found["attn_entropy"] <= 1 + 1e-6


def test_the_image_attending_alone_has_no_text_queries():
    model = matcher(fusion_direction="image_to_text")
    assert attention_balance(model, *encoded(model)) == {}
    both = matcher(fusion_direction="both")
    assert 0 < attention_balance(both, *encoded(both))["attn_image_share"] < 1


def test_evenness_against_scipy():
    weights = torch.rand(2, 3, 4, 6)
    weights[1, ..., 4:] = 0
    weights /= weights.sum(-1, keepdim=True)
    found = evenness(weights, torch.tensor([6, 4]))
    for sample, keys in enumerate((6, 4)):
        reference = stats.entropy(weights[sample].double().numpy(), axis=-1) / np.log(keys)
        np.testing.assert_allclose(found[sample], reference, atol=1e-6)
    assert evenness(torch.ones(1, 1, 2, 1), torch.tensor([1])).tolist() == [[[0.0, 0.0]]]
    with pytest.raises(ValueError, match=r"keys \(6,\) must have a number for each sample"):
        evenness(weights, torch.ones(6))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 277, 100_000])
def test_watched_pairs_are_spread_over_all(count):
    found = watched(count).tolist()
    assert len(found) == len(set(found)) == min(64, count)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, count - 1)
    steps = {after - before for before, after in pairwise(found)}
    assert not steps or max(steps) - min(steps) <= 1
