"""Zero-shot classification against open_clip's, on a dual encoder that is easy to see through."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crossmodal.zeroshot import TEMPLATES, zero_shot_classifier, zero_shot_counts
from vision.evaluate import count, metrics

NAMES = ["cat", "red apple", "moon", "{brace}", "sailing boat"]


def tokenize(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, filled up with a number that a model must not look at."""
    longest = max(len(text.encode()) for text in texts)
    rows = [list(text.encode()) + [255] * (longest - len(text.encode())) for text in texts]
    lengths = torch.tensor([len(text.encode()) for text in texts])
    return torch.tensor(rows), torch.arange(longest) < lengths[:, None]


class Dual(nn.Module):
    """Mean of embeddings, and pixels through a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 12)
        self.drop = nn.Dropout(0.5)
        self.project = nn.Linear(48, 12)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(20.0)))
        self.seen: list[int] = []

    def encode_text(self, tokens, mask, normalize=True):
        self.seen.append(len(tokens))
        x = (self.drop(self.embed(tokens)) * mask[..., None]).sum(dim=1) / mask.sum(1, keepdim=True)
        return F.normalize(x, dim=-1) if normalize else x

    def encode_image(self, images, normalize=True):
        x = self.project(images.flatten(1))
        return F.normalize(x, dim=-1) if normalize else x


@pytest.fixture
def model() -> Dual:
    torch.manual_seed(0)
    return Dual()


@pytest.mark.parametrize("templates", [TEMPLATES, ("{}",), ("a {} here", "{}, twice {}")])
@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_the_classifier_equals_open_clips(model, templates, batch_size):
    open_clip = pytest.importorskip("open_clip")

    class Theirs:
        """What open_clip expects: ids alone, padding recognised by its number."""

        def encode_text(self, tokens, normalize):
            return model.eval().encode_text(tokens, tokens != 255, normalize)

    expected = open_clip.build_zero_shot_classifier(
        Theirs(),
        lambda texts: tokenize(texts)[0],
        NAMES,
        [lambda name, t=t: t.replace("{}", name) for t in templates],
    )
    model.train()
    model.seen.clear()
    found = zero_shot_classifier(model, tokenize, NAMES, templates, batch_size=batch_size)
    assert found.shape == (12, 5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.norm(dim=0), torch.ones(5))
    assert max(model.seen) <= batch_size
    assert sum(model.seen) == 5 * len(templates)
    assert model.training, "as before"
    assert not found.requires_grad


def test_counts_are_those_of_the_scaled_similarities(model):
    classifier = zero_shot_classifier(model, tokenize, NAMES)
    images, targets = torch.randn(40, 3, 4, 4), torch.randint(5, (40,))
    with torch.no_grad():
        logits = 20 * model.encode_image(images) @ classifier
    found, expected = zero_shot_counts(model, images, targets, classifier), count(logits, targets)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    right = (logits.argmax(dim=1) == targets).double().mean()
    assert metrics(found)["val/top1"] == pytest.approx(100 * float(right))


def test_half_precision_around_it_changes_no_count_by_rounding_the_product(model):
    """Classes closer than bfloat16 can tell apart."""
    images = torch.randn(64, 3, 4, 4)
    own = model.encode_image(images).detach()
    model.encode_image = lambda images, normalize=True: own
    classifier = F.normalize(own[0] + 1e-4 * torch.randn(5, 12), dim=1).T
    targets = (own @ classifier).argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = zero_shot_counts(model, images, targets, classifier)
        rounded = (own @ classifier).argmax(dim=1)
    assert found["top1"] == 64
    assert (rounded != targets).any()


def test_bad_names_and_templates_are_named(model):
    for names, templates, message in (
        ("cat", TEMPLATES, r"class_names \('cat'\) must be a list"),
        ([], TEMPLATES, r"class_names \(\[\]\)"),
        (NAMES, "a {}", r"templates \('a \{\}'\) must be a list"),
        (NAMES, ["a {}", "a drawing"], r"template 'a drawing' must have \{\}"),
        (["a", "b", "a"], TEMPLATES, "class_names must differ; a occur"),
    ):
        with pytest.raises(ValueError, match=message):
            zero_shot_classifier(model, tokenize, names, templates)
    with pytest.raises(ValueError, match="batch_size"):
        zero_shot_classifier(model, tokenize, NAMES, batch_size=0)


def test_templates_are_different_and_the_first_is_the_bare_name():
    assert TEMPLATES[0] == "{}"
    assert len({*TEMPLATES}) == len(TEMPLATES)
    assert all(template.count("{}") == 1 for template in TEMPLATES)
