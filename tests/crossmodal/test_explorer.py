"""Words in the explorer, against the maps that `crossmodal.overlay` makes of them."""

from __future__ import annotations

import pytest
import torch

import crossmodal  # noqa: F401  its models are registered
import zoo
from crossmodal.data import load_pairs
from crossmodal.explorer import ELSEWHERE, explore_words
from crossmodal.looks import fixed_pairs
from crossmodal.overlay import word_maps
from zoo.pages.explorer_pack import decode
from zoo.preprocess import normalize

SIZE = {"img_size": (8, 16), "in_chans": 1, "image_options": {"widths": [8, 8, 8]}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("matcher_micro", {"text_tower": "text_bag"}),
        ("matcher_micro", {"text_tower": "text_bag", "fusion_layout": "merged"}),
        ("captioner_micro", {"dim": 16, "context_length": 24}),
        ("captioner_micro", {"dim": 16, "context_length": 24, "decoder": "lstm_additive"}),
    ],
)
def test_words_look_where_the_pictures_say(name: str, options: dict) -> None:
    torch.manual_seed(0)
    model = zoo.create_model(name, **{**SIZE, **options})
    batch = fixed_pairs(model, load_pairs("strips:2").val, [3, 250], ["red heart", "a b c"])
    images = normalize(batch["images"], model.card.preprocessing)
    found = explore_words(model, batch)
    for layer, maps in enumerate(found.maps):
        for head in range(maps.codes.shape[1]):
            words, expected = word_maps(
                model, images, batch["tokens"], batch["mask"], layer=layer, head=head
            )
            weights = decode(maps.codes)[:, head, :, maps.keys.start :]
            shown = weights.unflatten(-1, tuple(maps.keys.grid))
            torch.testing.assert_close(shown, expected, atol=5e-3, rtol=0)
        assert maps.queries.names == words == [["red", "heart"], ["a", "b", "c"]]
        merged = options.get("fusion_layout") == "merged"
        assert maps.keys.names[0] == ((ELSEWHERE,) if merged else ())
        assert maps.name in found.looks


def test_a_model_that_does_not_look_is_refused() -> None:
    model = zoo.create_model("captioner_micro", **SIZE, dim=16, decoder="lstm_fixed")
    batch = fixed_pairs(model, load_pairs("strips:2").val, [3])
    with pytest.raises(ValueError, match="sees the image as one vector"):
        explore_words(model, batch)
