"""Evaluates models of images and captions: recall with intervals, zero-shot classes, captions.

Command:
    accelerate launch recipes/evaluate_crossmodal.py --model runs/NAME
    accelerate launch recipes/evaluate_crossmodal.py --model runs/NAME --compare runs/OTHER
    accelerate launch recipes/evaluate_crossmodal.py --model runs/NAME --checkpoint best
    accelerate launch recipes/evaluate_crossmodal.py --model runs/NAME --zero-shot folder:PATH
    accelerate launch recipes/evaluate_crossmodal.py --model local-dir:FOLDER --data pairs:FILE \\
        --val-share 1 --out report.json

The first evaluates a run on its own data. What is evaluated follows from the model: a dual encoder
and a matcher find, a captioner writes. Every pair counts once, on any number of processes.

Intervals take queries as independent: where images have several captions, those of captions that
look for their image (t2i) are too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import vision
from crossmodal.captioner import Captioner
from crossmodal.data import PairDataset, Pairs
from crossmodal.dual import DualEncoder
from crossmodal.evaluate import (
    caption_references,
    caption_rows,
    image_rows,
    match_ranks,
    score_captions,
    text_rows,
    written_captions,
)
from crossmodal.matcher import Matcher
from crossmodal.retrieval import (
    KS,
    compare_recall,
    rank_metrics,
    recall_interval,
    retrieval_ranks,
)
from crossmodal.scores import by_length
from crossmodal.training import PairOptions, PairTask
from crossmodal.zeroshot import TEMPLATES, zero_shot_classifier, zero_shot_counts
from vision.evaluate import class_rows, interval, metrics
from zoo import engine
from zoo.engine.tracking import write_json
from zoo.run_folder import LAST, find_trained

SAMPLES = 10
WAYS = {"i2t": "image to text", "t2i": "text to image"}  # the one finds the other

Ranks = dict[str, dict[str, Tensor]]  # by stage and way
Report = dict[str, Any]
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Config:
    """Evaluates a model of images and captions."""

    model: str
    """A run folder, local-dir:FOLDER as zoo.save_pretrained writes it, hf-hub:OWNER/REPO, or the
    name of a model that has weights."""
    checkpoint: str = "last"
    """Of a run folder: last, best, a step, or a file of its checkpoints/."""
    data: str | None = None
    """emoji, pairs:FILE, wds:PATTERN, hf:NAME, strips:N or needle:N; by default the run's data, as
    the run read it."""
    part: Literal["val", "train", "style", "style_unseen"] = "val"
    """Of the data. style and style_unseen are the emoji of training and of val as OpenMoji draws
    them."""
    languages: tuple[str, ...] = ()
    """Of the emoji's names; by default the run's, or en where --data is given."""
    image_column: str | None = None
    """Of files, shards' JSON and hf:, as in training."""
    caption_column: str | None = None
    """Of files, shards' JSON and hf:, as in training."""
    val_share: float | None = None
    """Share of the images that is val, in data without parts; 1 takes all."""
    bad_rows: Literal["stop", "skip"] | None = None
    """Pairs that cannot be used: stop and name them, or skip and count them."""
    compare: str | None = None
    """Another model, as --model: the difference in recall on the same queries."""
    compare_checkpoint: str = "last"
    """Of that run folder, as --checkpoint."""
    rerank: int | None = None
    """Of a matcher: candidates that it puts into order; by default as in its run, or 16."""
    rerank_similarity: bool | None = None
    """Whether it adds the similarity of the vectors to its log-odds; by default as in its run."""
    zero_shot: str | None = None
    """Classify as well, by the names of the classes: emoji, digits or folder:PATH. emoji are the
    drawings of --part where the data is emoji."""
    templates: tuple[str, ...] = TEMPLATES
    """Texts for that, in which {} stands for the name of a class."""
    beams: int | None = None
    """Of a captioner: captions that it follows at once; by default as in its run, or 1."""
    batch_size: int = 256
    """Images or captions per process and forward pass."""
    workers: int = 0
    """Processes that read images; 0 reads in this process."""
    out: str | None = None
    """A JSON file for the numbers."""


def main(config: Config) -> Report:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, flags = load(config.model, config.checkpoint, accelerator.print)
    check(config, model)
    rival = load_rival(config, accelerator.print) if config.compare else None
    options = pair_options(config, flags)
    data = options.load()
    pairs = part_of(data, config.part)
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)

    def job(model: Any, flags: dict[str, Any]) -> Job:
        task = PairTask(model, data, options, seed=0)
        return Job(config, flags, accelerator, model.to(accelerator.device), task, pairs)

    own = job(model, flags)
    report: Report = {"model": named(config.model, config.checkpoint)}
    report |= {"data": options.data, "part": config.part}
    report |= {"images": len(pairs), "captions": len(pairs.texts()[0]), "pairs": data.report}
    if isinstance(model, Captioner):
        report |= captioning(own, languages=options.languages)
    else:
        ranks = all_ranks(own)
        report |= retrieval(ranks, pairs, config.part)
        if config.compare and rival:
            other = all_ranks(job(*rival))
            name = named(config.compare, config.compare_checkpoint)
            report |= comparison(name, ranks, other, pairs, config.part)
        if config.zero_shot:
            report["zero_shot"] = zero_shot(own, config.zero_shot)
    if accelerator.is_main_process:
        show(report)
        if config.out:
            write_json(Path(config.out), report)
    accelerator.end_training()
    return report


@dataclass(frozen=True)
class Job:
    """A model, what it is evaluated on, and where."""

    config: Config
    flags: dict[str, Any]  # of its training
    accelerator: Any
    model: Any
    task: PairTask
    pairs: Pairs

    def flag(self, name: str, default: Any) -> Any:
        """As given, as in training, or `default`."""
        given = getattr(self.config, name)
        return self.flags.get(name, default) if given is None else given

    def loader(self, source: Any) -> Any:
        sizes = self.config.batch_size, self.config.workers
        return engine.evaluation_loader(self.accelerator, source, *sizes)

    def rows(self, source: Any, fn: Callable[[Any, Any], dict[str, Tensor]]) -> dict[str, Tensor]:
        found = engine.collect(self.accelerator, self.model, self.loader(source), fn)
        assert found is not None  # nobody asked to stop
        return found


def load(name: str, checkpoint: str, tell: Tell) -> tuple[Any, dict[str, Any]]:
    """A model and the flags of its training; none where it does not come from a run folder."""
    found = find_trained(name, checkpoint=checkpoint)
    return found.create(tell), found.flags


def load_rival(config: Config, tell: Tell) -> tuple[Any, dict[str, Any]]:
    model, flags = load(str(config.compare), config.compare_checkpoint, tell)
    if not isinstance(model, DualEncoder):
        raise ValueError(
            f"--compare {config.compare} is a {type(model).__name__}, and must be a DualEncoder or "
            "a Matcher"
        )
    return model, flags


def named(model: str, checkpoint: str) -> str:
    return model if checkpoint == LAST else f"{model} ({checkpoint})"


def check(config: Config, model: Any) -> None:
    """Refuses a model that is none of pairs, and flags that are for another."""
    if config.compare_checkpoint != LAST and not config.compare:
        raise ValueError(f"--compare-checkpoint {config.compare_checkpoint} needs --compare RUN")
    if not isinstance(model, (DualEncoder, Captioner)):
        raise ValueError(
            f"--model {config.model} is a {type(model).__name__}, and must be a DualEncoder, a "
            "Matcher or a Captioner: recipes/evaluate.py evaluates classifiers"
        )
    kinds = {"compare": DualEncoder, "zero_shot": DualEncoder, "beams": Captioner}
    for name, kind in {**kinds, "rerank": Matcher, "rerank_similarity": Matcher}.items():
        if getattr(config, name) is not None and not isinstance(model, kind):
            raise ValueError(
                f"--{name.replace('_', '-')} is for a {kind.__name__}, and --model {config.model} "
                f"is a {type(model).__name__}"
            )


def pair_options(config: Config, flags: dict[str, Any]) -> PairOptions:
    """How the data is read: as the run did, unless --data is given."""
    if config.data is None and not flags:
        raise ValueError(f"--data is needed with --model {config.model}, which is no run folder")
    names = {field.name for field in fields(PairOptions)}
    own = {} if config.data else {name: flags[name] for name in names & flags.keys()}
    own = {name: tuple(x) if isinstance(x, list) else x for name, x in own.items()}
    given = {
        name: getattr(config, name)
        for name in ("data", "languages", "image_column", "caption_column", "val_share", "bad_rows")
        if getattr(config, name) not in (None, ())
    }
    return replace(PairOptions(**own), **given)


def part_of(data: PairDataset, name: str) -> Pairs:
    parts = {"train": data.train, "val": data.val, **data.extra}
    if name not in parts or not len(parts[name]):
        legal = ", ".join(part for part, pairs in parts.items() if len(pairs))
        remedy = ""
        if name.startswith("style") and data.name.startswith("emoji"):
            remedy = "; for a second style: pip install 'attention-zoo[style]'"
        raise ValueError(f"--part {name}: {data.name} has {legal}{remedy}")
    return parts[name]


def all_ranks(job: Job) -> Ranks:
    """Ranks both ways by the dual encoder, and once a matcher has put the nearest into order."""
    tokens = isinstance(job.model, Matcher)
    images = job.rows(job.task.pairs(job.pairs), image_rows(job.task, tokens))
    texts = job.rows(job.task.captions(job.pairs), text_rows(tokens))
    owners = job.pairs.texts()[1]
    found = {"dual": retrieval_ranks(images["vector"], texts["vector"], owners)}
    if tokens:
        how = {"k": job.flag("rerank", 16), "similarity": job.flag("rerank_similarity", True)}
        found["match"] = match_ranks(job.model, images, texts, job.pairs, **how)
    return found


def retrieval(ranks: Ranks, pairs: Pairs, part: str) -> Report:
    """Recall and its intervals, named as in training; of a matcher also what matching changed."""
    values: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for stage, ways in ranks.items():
        for way, found in ways.items():
            prefix = f"{part}/{'dual_' if stage != final(ranks) else ''}{way}_"
            measured = rank_metrics(found, candidates(pairs)[way])
            values |= {prefix + name: value for name, value in measured.items()}
            intervals |= {
                f"{prefix}recall@{k}": recall_interval(found, k)
                for k in KS
                if f"recall@{k}" in measured
            }
    report: Report = {"metrics": values, "intervals": intervals}
    if "match" in ranks:
        report["matching"] = differences(ranks["match"], ranks["dual"], pairs, part)
    return report


def comparison(name: str, ranks: Ranks, other: Ranks, pairs: Pairs, part: str) -> Report:
    """Another model's recall, and by how much ours is above it."""
    found = differences(ranks[final(ranks)], other[final(other)], pairs, part)
    return {"compared": {"with": name, **retrieval(other, pairs, part), "differences": found}}


def differences(
    first: dict[str, Tensor], second: dict[str, Tensor], pairs: Pairs, part: str
) -> dict[str, dict[str, Any]]:
    return {
        f"{part}/{way}_recall@{k}": compare_recall(first[way], second[way], k)._asdict()
        for way in WAYS
        for k in KS
        if k <= candidates(pairs)[way]
    }


def candidates(pairs: Pairs) -> dict[str, int]:
    return {"i2t": len(pairs.texts()[0]), "t2i": len(pairs)}


def final(ranks: Ranks) -> str:
    return list(ranks)[-1]


def zero_shot(job: Job, spec: str) -> Report:
    """Accuracies and a table by class, by the names of the classes alone."""
    own = spec == "emoji" and job.task.data.name.partition(":")[0] == "emoji"
    if own:
        images, names, of = job.pairs.images, job.task.data.class_names, job.config.part
    else:
        data = vision.load_dataset(spec, splits=("val",))
        images, names, of = data.val, data.class_names, "val"
    source = vision.make_source(images, job.task.preprocessing, train=False)
    classifier = zero_shot_classifier(job.model, job.task.tokenizer, names, job.config.templates)

    def count_fn(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return zero_shot_counts(model, job.task.inputs(batch), batch["targets"], classifier)

    sums = engine.evaluate(job.accelerator, job.model, job.loader(source), count_fn)
    assert sums is not None  # nobody asked to stop
    rows = class_rows(sums, list(names))
    return {
        "data": f"{spec}, {of}",
        "templates": job.config.templates,
        "metrics": {name.replace("val/", ""): value for name, value in metrics(sums).items()},
        "top1_interval": interval(int(sums["top1"]), int(sums["n"])),
        "classes": [asdict(row) for row in rows],
    }


def captioning(job: Job, languages: Sequence[str]) -> Report:
    """Scores of what the model writes, also by the length of the right caption, and samples."""
    language = languages[0] if len(languages) == 1 else None
    rows = job.rows(job.task.pairs(job.pairs), caption_rows(job.task, job.flag("beams", 1)))
    scores = score_captions(job.task, rows, job.pairs, language)
    written, references = written_captions(job.task, rows), caption_references(job.task, job.pairs)
    bins = by_length(written, references, language=language)
    step = max(1, len(written) // SAMPLES)
    samples = list(zip(references, written, strict=True))[: step * SAMPLES : step]
    return {
        "metrics": {f"{job.config.part}/{name}": value for name, value in scores.items()},
        "by_length": [found._asdict() for found in bins],
        "samples": [{"references": right, "written": text} for right, text in samples],
    }


def show(report: Report) -> None:
    """Prints the numbers as tables."""
    title = f"{report['model']} on {report['data']}, {report['part']}"
    size = f"{report['images']} images, {report['captions']} captions"
    if "by_length" in report:
        for name, value in report["metrics"].items():
            print(f"{name:20} {value:.4g}")
        show_captions(report, f"{title}: {size}")
        return
    show_recall(report, f"{title}: {size}")
    if "matching" in report:
        show_differences(report["matching"], "matching less dual encoder")
    if "compared" in report:
        other = report["compared"]
        show_recall(other, f"{other['with']} on the same")
        show_differences(other["differences"], f"{report['model']} less {other['with']}")
    if "zero_shot" in report:
        show_classes(report["zero_shot"], report["model"])


def show_recall(report: Report, title: str) -> None:
    rows = []
    for name in report["metrics"]:
        if not name.endswith("median_rank"):
            continue
        prefix = name.removesuffix("median_rank")
        stage, way = prefix.rpartition("/")[2].removesuffix("_").rpartition("_")[::2]
        stage = "match" if not stage and "matching" in report else "dual"
        recalls = [_share(report, f"{prefix}recall@{k}") for k in KS]
        rows.append([WAYS[way], stage, *recalls, f"{report['metrics'][name]:.1f}"])
    columns = ["", "by", *(f"recall@{k} %" for k in KS), "median\nrank"]
    table(f"{title}\nbelow each recall its 95 % interval", columns, rows, left=2)


def _share(report: Report, name: str) -> str:
    if name not in report["metrics"]:
        return "-"
    low, high = report["intervals"][name]
    return f"{report['metrics'][name]:.1f}\n{low:.1f} to {high:.1f}"


def show_differences(found: dict[str, dict[str, Any]], title: str) -> None:
    rows = [
        [
            name.rpartition("/")[2],
            f"{x['difference']:+.1f} ({x['low']:+.1f} to {x['high']:+.1f})",
            f"{x['only_first']} : {x['only_second']}",
            f"{x['p_value']:.2g}",
        ]
        for name, x in found.items()
    ]
    columns = ["recall", "points (95 % interval)", "found by one only", "p (McNemar)"]
    table(title, columns, rows)


def show_classes(found: Report, model: str) -> None:
    rows = []
    for row in found["classes"]:
        shares = (row["recall"], row["precision"])
        numbers = ("-" if math.isnan(x) else f"{x:.1f}" for x in shares)
        rows.append([row["name"], str(row["n"]), *numbers])
    table(f"{model}, zero-shot on {found['data']}", CLASS_COLUMNS, rows)
    low, high = found["top1_interval"]
    for name, value in found["metrics"].items():
        extra = f"  (95 % interval {low:.2f} to {high:.2f})" if name == "top1" else ""
        print(f"{name:10} {value:.4g}{extra}")


CLASS_COLUMNS = ["class", "images", "recall %", "precision %"]


def show_captions(report: Report, title: str) -> None:
    rows = []
    for x in report["by_length"]:
        words = f"{x['shortest']} to {x['longest']}" if x["longest"] else f"{x['shortest']} or more"
        words = str(x["shortest"]) if x["longest"] == x["shortest"] else words
        rows.append([words, str(x["n"]), *(f"{x[name]:.1f}" for name in ("bleu", "chrf", "exact"))])
    table(title, ["words", "captions", "BLEU", "chrF", "exact %"], rows)
    samples = [[x["references"][0], x["written"]] for x in report["samples"]]
    table("samples", ["right", "written"], samples, left=2)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Prints a table; columns after the first `left` hold numbers."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=escape(title))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        made.add_row(*map(escape, row))
    Console().print(made)


if __name__ == "__main__":
    engine.cli(main, Config)
