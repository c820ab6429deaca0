"""Alarms in trainings of a matcher: silent with norms, and not with a modality that is larger."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from crossmodal.balance import watched
from crossmodal.data import Pairs, load_pairs
from crossmodal.fusion import modality_share
from crossmodal.looks import fixed_pairs
from crossmodal.loss import contrastive_loss
from crossmodal.matcher import match_loss
from crossmodal.training import PairOptions, PairTask
from zoo.diagnostics.alarms import Alarm, Alarms
from zoo.diagnostics.looks import look_at_layer
from zoo.engine.optim import adamw
from zoo.preprocess import normalize

SMALL = {"text_tower": "text_bag", "tokenizer": "bytes", "img_size": 16, "gated": False}
BATCH, UPDATES = 32, 8


def train(seed: int = 5, **options: Any) -> list[Alarm]:
    """The alarms of a short training, with a look after each update."""
    torch.manual_seed(seed)
    data = load_pairs("emoji")
    model: Any = zoo.create_model(
        "matcher_micro", **SMALL, in_chans=data.in_chans, fusion_layout="merged", **options
    )
    task = PairTask(model, data, PairOptions(), seed)
    alarms, optimizer, found = Alarms(UPDATES), adamw(model, 2e-3), []
    order = torch.randperm(len(task.train)).tolist()
    for step in range(UPDATES):
        keys = [(0, sample) for sample in order[BATCH * step : BATCH * step + BATCH]]
        rows = {"epoch": 0, "index": step, "size": len(keys)}
        batch = task.prepare({**task.train.__getitems__(keys), **rows})
        out = model.train()(batch["images"], batch["tokens"], batch["mask"], key=(seed, step))
        loss = contrastive_loss(out.image, out.text, out.scale, out.bias, kind=model.loss)
        loss = loss + match_loss(out)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += alarms.check(step + 1, **looks(model, data.val))
    return found


@torch.no_grad()
def looks(model: Any, pairs: Pairs) -> dict[str, Any]:
    """At 4 validation pairs, of the layers over both modalities."""
    model.eval()
    batch = fixed_pairs(model, pairs, watched(len(pairs), 4).tolist())
    mask, images = batch["mask"], normalize(batch["images"], model.card.preprocessing)
    image, text = model.image_tower(images), model.text_tower(batch["tokens"], mask)
    kept = "fusion.*"
    with (
        zoo.capture_attention(model, kept) as weights,
        zoo.capture_attention(model, kept, what="logits") as logits,
    ):
        model.match(image, text)
    seen = torch.cat([mask, mask.new_ones(len(mask), image.tokens.shape[1])], 1)[:, None, None]
    layers, shares = {}, {}
    for name, (maps,) in weights.items():
        own = maps * mask[:, None, :, None]  # padding asks nothing
        layers[name] = look_at_layer(own, mask=seen, logits=logits[name][0])
        share = float(modality_share(maps, mask.shape[1]).mean(1)[mask].mean())
        shares[name] = {"text": share, "image": 1 - share}
    return {"layers": layers, "shares": shares}


@pytest.mark.parametrize("options", [{}, {"image_scale": 100.0}], ids=["as is", "larger images"])
def test_norms_keep_it_silent(options):
    assert train(**options) == []


def test_a_modality_that_is_larger_and_not_normalised():
    found = train(fusion_norm="none", image_scale=100.0)
    told = {alarm.kind for alarm in found}
    assert "dominant_modality" in told
    assert told <= {"dominant_modality", "stiff", "large_logits", "collapse", "nan_ahead"}
    alarm = next(alarm for alarm in found if alarm.kind == "dominant_modality")
    assert alarm.remedies[0] == "--fusion-norm per_modality"
