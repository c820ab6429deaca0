"""What the training of models of pairs needs besides the model and its loss.

Shapes: b batch, n tokens, m images, t captions, d width of a token, e width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import zoo
from crossmodal.balance import attention_balance, watched
from crossmodal.captioner import caption_losses, token_counts
from crossmodal.data import (
    CaptionSource,
    PairDataset,
    Pairs,
    PairSource,
    load_pairs,
    make_caption_source,
    make_pair_source,
    trim,
)
from crossmodal.encoded import Encoded
from crossmodal.generate import generate
from crossmodal.loss import contrastive_loss
from crossmodal.retrieval import rank_metrics, rerank, retrieval_metrics
from crossmodal.scores import caption_scores
from vision.augment import Augment
from zoo.preprocess import normalize

Rows = Mapping[str, Tensor]


@dataclass(frozen=True)
class PairOptions:
    """Flags that recipes for images and captions share: what is read and what is done to it."""

    data: str = "emoji"
    """emoji (1,636 drawings of 32x32 and their names), pairs:FILE (JSONL, CSV or TSV of image and
    caption), wds:PATTERN (tar shards), hf:NAME, strips:N or needle:N (digits in a row)."""
    val_data: str | None = None
    """Validation pairs in a file of their own; else the data's own, or a share of its images."""
    val_share: float = 0.1
    """That share."""
    languages: tuple[str, ...] = ("en",)
    """Of the emoji's names (ar de en es fa fr id it ja ko pt ru tr zh): one caption of each."""
    image_column: str = "image"
    """Of files, shards' JSON and hf:."""
    caption_column: str = "caption"
    """Of files, shards' JSON and hf:."""
    img_size: int | tuple[int, int] | None = None
    """Rows and columns, or one number for both; the data's or the model's own by default."""
    spatial: Literal["auto", "none", "affine", "crop"] = "auto"
    """auto: affine for data in memory, random resized crops otherwise."""
    hflip: float | None = None
    """Chance of a horizontal flip; by default the data set's (emoji and probes 0, others 0.5)."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """Automatic augmentation per image, by torchvision."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Pairs that cannot be used: stop and name them, or skip and count them."""
    image_tower: str | None = None
    """An image model: ours, timm:NAME, torchvision:NAME, open_clip:ARCH; the model's by default."""
    text_tower: str | None = None
    """A text tower: text_bag, text_micro, ..., open_clip:ARCH; the model's by default."""
    image_weights: str | None = None
    """Weights that the image tower starts from: timm:NAME, torchvision:NAME, local-dir:FOLDER."""
    tokenizer: str | None = None
    """clip, bytes or hf:FOLDER; the text tower's by default."""
    context_length: int | None = None
    """Most tokens of a caption; the tokenizer's by default."""
    freeze: tuple[str, ...] = ()
    """Parts that do not learn: image, text (all of it), image:2 (its stem and first 2 stages)."""

    def __post_init__(self) -> None:
        self.frozen()

    def load(self) -> PairDataset:
        return load_pairs(
            self.data,
            languages=self.languages,
            val=self.val_data,
            val_share=self.val_share,
            bad_rows=self.bad_rows,
            image_column=self.image_column,
            caption_column=self.caption_column,
        )

    @property
    def augment(self) -> Augment:
        return Augment(spatial=self.spatial, hflip=self.hflip, policy=self.policy)

    def frozen(self) -> dict[str, int | str]:
        """`freeze` as options of a model.

        >>> PairOptions(freeze=("image:2", "text")).frozen()
        {'freeze_image': 2, 'freeze_text': 'all'}
        """
        found: dict[str, int | str] = {}
        for word in self.freeze:
            part, colon, blocks = word.partition(":")
            if part not in ("image", "text") or (
                colon and blocks != "all" and not blocks.isdigit()
            ):
                raise ValueError(
                    f"freeze {word!r} must be image or text, or with a number of blocks, image:2"
                )
            found[f"freeze_{part}"] = int(blocks) if blocks.isdigit() else "all"
        return found

    def model_options(self, data: PairDataset) -> dict[str, Any]:
        """Options of the model that these flags and the data set; what nobody set is left out."""
        given = {
            "img_size": self.img_size or data.size,
            "in_chans": data.in_chans,
            **{
                name: getattr(self, name)
                for name in ("image_tower", "text_tower", "tokenizer", "context_length")
            },
            **self.frozen(),
        }
        return {name: value for name, value in given.items() if value is not None}


def check_validation(data: PairDataset, least: int) -> None:
    """Refuses data with too few validation pairs, before an epoch is trained for nothing."""
    if len(data.val) < least:
        raise ValueError(
            f"{data.name} has {len(data.val)} validation pairs, and {least} or more are needed"
            f"{': recall of the only one says nothing' if least > 1 else ''}; give --val-data, a "
            f"larger --val-share, or a split column with more rows of val"
        )


def build(options: PairOptions, name: str, data: PairDataset, **own: Any) -> Any:
    """The model of a run, on the CPU.

    Args:
        options: Flags.
        name: Of the model.
        data: Decides size and channels where the flags do not.
        own: More options of `zoo.create_model`; they win.
    """
    model: Any = zoo.create_model(name, **{**options.model_options(data), **own})
    if options.image_weights:
        report = zoo.load_pretrained(model.image_tower.trunk, options.image_weights)
        print(f"image tower from {options.image_weights}: {report}")
    return model


class PairTask:
    """A data set as one model takes it: sources of batches, and what is done to a batch.

    Args:
        model: Has a card, which says how images become inputs, and a tokenizer.
        data: The pairs.
        options: What is done to the images in training.
        seed: Keys augmentation and the choice of captions, with epoch and sample.

    Attributes:
        train: A source of pairs, augmented.
        preprocessing, tokenizer: The model's.
    """

    def __init__(self, model: Any, data: PairDataset, options: PairOptions, seed: int) -> None:
        self.preprocessing, self.tokenizer = model.card.preprocessing, model.make_tokenizer()
        self.data = data
        self.train = make_pair_source(
            data.train,
            self.preprocessing,
            self.tokenizer,
            train=True,
            augment=options.augment,
            seed=seed,
        )

    def pairs(self, pairs: Pairs) -> PairSource:
        """Images, each with its first caption, in order."""
        return make_pair_source(
            pairs, self.preprocessing, self.tokenizer, train=False, length=self._length(pairs)
        )

    def captions(self, pairs: Pairs) -> CaptionSource:
        """All captions, image by image; the rows of all batches have one length."""
        return make_caption_source(pairs, self.tokenizer, length=self._length(pairs))

    def _length(self, pairs: Pairs) -> int:
        return int(max(self.tokenizer.lengths(pairs.texts()[0])))

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of the training source as the model takes it."""
        return {**trim(batch), "images": self.inputs(batch)}

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Pixels of a batch -> what the model takes (b c y x)."""
        return normalize(batch["images"], self.preprocessing)


def image_rows(task: PairTask, tokens: bool = False) -> Callable[[Any, Any], dict[str, Tensor]]:
    """What retrieval needs of each image: `vector` (b e); of a matcher `tokens`, `pooled` too."""

    def rows(model: Any, batch: Any) -> dict[str, Tensor]:
        image = model.image_tower(task.inputs(batch))
        return {"vector": model.embed_image(image), **(_kept(image) if tokens else {})}

    return rows


def text_rows(tokens: bool = False) -> Callable[[Any, Any], dict[str, Tensor]]:
    """What retrieval needs of each caption, as `image_rows`, with its `mask`."""

    def rows(model: Any, batch: Any) -> dict[str, Tensor]:
        text = model.text_tower(batch["tokens"], batch["mask"])
        return {"vector": model.embed_text(text), **(_kept(text) if tokens else {})}

    return rows


def _kept(encoded: Encoded) -> dict[str, Tensor]:
    kept = {"tokens": encoded.tokens, "pooled": encoded.pooled}
    return kept if encoded.mask is None else {**kept, "mask": encoded.mask}


@torch.no_grad()
def score_dual(model: Any, images: Rows, texts: Rows, pairs: Pairs) -> dict[str, float]:
    """Loss and recall of a dual encoder from the rows of all images (m ...) and captions (t ...).

    The loss is over batches of 256 pairs of an image and its first caption.
    """
    owners = pairs.texts()[1]
    metrics = retrieval_metrics(images["vector"], texts["vector"], owners)
    first = torch.unique_consecutive(owners, return_counts=True)[1].cumsum(0).roll(1)
    first[0] = 0
    total, device = 0.0, model.logit_scale.device
    bias = None if model.logit_bias is None else model.logit_bias.float()
    for rows in torch.arange(len(first)).split(256):
        image = images["vector"][rows].to(device)
        text = texts["vector"][first[rows]].to(device)
        loss = contrastive_loss(
            image, text, model.logit_scale.float().exp(), bias, kind=model.loss, alone=True
        )
        total += float(loss) * len(rows)
    return {"loss": total / len(first), **metrics}


@torch.no_grad()
def score_matcher(
    model: Any, images: Rows, texts: Rows, pairs: Pairs, k: int = 16, similarity: bool = True
) -> dict[str, float]:
    """Recall after the matcher has reordered the `k` nearest, and `dual_...` before it.

    They are ordered by the log-odds of the matcher, to which `similarity` adds the scaled
    similarity of the two vectors (as BLIP does, arXiv 2201.12086).
    """
    dual = score_dual(model, images, texts, pairs)
    owners = pairs.texts()[1]
    captions: list[list[int]] = [[] for _ in range(len(pairs))]
    for caption, owner in enumerate(owners.tolist()):
        captions[owner].append(caption)

    def match(image: Tensor, text: Tensor) -> Tensor:
        device = model.logit_scale.device
        odds = model.match(_taken(images, image, device), _taken(texts, text, device)).cpu()
        near = (images["vector"][image] * texts["vector"][text]).sum(dim=1)
        return odds + similarity * model.logit_scale.exp().cpu() * near

    own = watched(len(pairs))
    first = torch.tensor([captions[image][0] for image in own.tolist()])
    device, training = model.logit_scale.device, model.training
    model.eval()
    balance = attention_balance(model, _taken(images, own, device), _taken(texts, first, device))
    t2i = rerank(texts["vector"], images["vector"], owners, lambda t, i: match(i, t), k=k)
    i2t = rerank(images["vector"], texts["vector"], captions, match, k=k)
    model.train(training)
    sides = {"i2t": (i2t, len(owners)), "t2i": (t2i, len(pairs))}
    found = {
        f"{side}_{name}": value
        for side, (ranks, candidates) in sides.items()
        for name, value in rank_metrics(ranks, candidates).items()
    }
    loss = dual.pop("loss")
    return {"loss": loss, **found, **{f"dual_{n}": v for n, v in dual.items()}, **balance}


def _taken(rows: Rows, index: Tensor, device: torch.device) -> Encoded:
    mask = rows["mask"][index].to(device) if "mask" in rows else None
    return Encoded(rows["tokens"][index].to(device), rows["pooled"][index].to(device), mask)


def caption_rows(task: PairTask, beams: int = 1) -> Callable[[Any, Any], dict[str, Tensor]]:
    """Of each image: what the model writes (`written`, b n; `length`), and how well it tells the
    first caption (`loss`; predicted `tokens` and right ones, `hits`)."""

    def rows(model: Any, batch: Any) -> dict[str, Tensor]:
        images, tokens, mask = task.inputs(batch), batch["tokens"], batch["mask"]
        logits = model(images, tokens, mask)
        hits, counted = token_counts(logits, tokens, mask)
        search: dict[str, Any] = {"method": "beam", "num_beams": beams} if beams > 1 else {}
        ids, written = generate(model, images, **search)
        return {
            "written": F.pad(ids, (0, model.context_length - ids.shape[1])),
            "length": written.sum(dim=1),
            "loss": caption_losses(logits, tokens, mask),
            "tokens": counted,
            "hits": hits,
        }

    return rows


def written_captions(task: PairTask, rows: Rows) -> list[str]:
    """What `caption_rows` collected, as text."""
    places = torch.arange(rows["written"].shape[1])
    return task.tokenizer.decode(rows["written"], places < rows["length"][:, None])


def score_captions(task: PairTask, rows: Rows, pairs: Pairs) -> dict[str, float]:
    """Loss, token accuracy, BLEU-4, chrF and exact matches against all captions of each image.

    References pass through the tokenizer, which may change case and spaces.
    """
    texts, owners = pairs.texts()
    references: list[list[str]] = [[] for _ in range(len(pairs))]
    plain = task.tokenizer.decode(*task.tokenizer(texts))
    for owner, text in zip(owners.tolist(), plain, strict=True):
        references[owner].append(text)
    return {
        "loss": float(rows["loss"].double().mean()),
        "token_accuracy": 100 * int(rows["hits"].sum()) / int(rows["tokens"].sum()),
        **caption_scores(written_captions(task, rows), references),
    }
