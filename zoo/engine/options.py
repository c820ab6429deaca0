"""The options that all training recipes share, as flat flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from zoo.layers.check import finite_fields

# What may differ between a run and its resumption without changing the result.
FREE_ON_RESUME = (
    *("out", "resume", "workers", "tracker", "log_every", "keep", "checkpoint_every"),
    *("save_attention_every", "stop_on_alarm", "report"),
)


@dataclass(frozen=True)
class TrainOptions:
    """Shared flags; a recipe's `Config` inherits them and adds its own."""

    model: str = "vit_micro_patch2_8"
    """Name of a model, see `zoo.list_models()`; timm:NAME, torchvision:NAME, open_clip:ARCH; or
    local-dir:FOLDER, hf-hub:OWNER/REPO, which bring their weights."""
    data: str = "digits"
    """digits (scikit-learn's 1,797 images of 8x8), emoji (1,636 drawings of 32x32, 8 categories) or
    folder:PATH (PATH/train, PATH/val)."""
    out: str | None = None
    """Run folder, which must not exist; a new one below runs/ by default."""
    resume: str | None = None
    """auto: continue the run in --out, or start it there; or the path of a run or a checkpoint."""
    pretrained: str | None = None
    """Weights to start from: timm:NAME, torchvision:NAME, open_clip:ARCH/TAG, hf-hub:OWNER/REPO,
    file:PATH, local-dir:FOLDER, url:ADDRESS#sha256=HEX."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 64
    """Images per process and forward pass."""
    grad_accumulation: int = 1
    """Forward passes per optimizer update."""
    lr: float = 1e-3
    """Peak learning rate; not scaled by the number of processes."""
    min_lr: float = 0.0
    """Learning rate of the last update."""
    warmup_epochs: float | None = None
    """Epochs of linear warm-up before the cosine; a tenth of all, at most 5, by default."""
    weight_decay: float = 0.05
    """AdamW's decay; none on norms, biases and positions."""
    layer_decay: float | None = None
    """Factor on the learning rate per block below the head, such as 0.75."""
    clip_grad: float | None = 1.0
    """Largest norm of the gradient of an update; None does not clip."""
    ema: bool = False
    """Evaluate and save an exponential moving average of the weights."""
    ema_decay: float = 0.999
    """Decay of that average after its warm-up."""
    grad_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, more time."""
    compile: bool = False
    """torch.compile the model."""
    seed: int = 0
    """Of weights, order, augmentation and mixing."""
    workers: int = 0
    """Processes that read images; 0 reads in the training process."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio", "mlflow", "aim", "comet_ml"] = (
        "none"
    )
    """Where to log besides metrics.jsonl; through Accelerate."""
    log_every: int = 20
    """Updates between rows of metrics.jsonl."""
    eval_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every: int = 0
    """Updates between checkpoints inside an epoch; one is written after every epoch anyway."""
    keep: int = 2
    """Checkpoints to keep, besides the best."""
    save_attention_every: int = 0
    """Updates between looks inside, at fixed validation samples, the last update included: maps in
    attention/, numbers in metrics.jsonl, warnings in alarms.jsonl (of most kinds after two looks);
    0 never looks."""
    stop_on_alarm: bool = False
    """Stop and save at the first of those warnings, with exit code 3 (launchers make 1 of it);
    --resume auto goes on as it is, without this flag; a remedy is a new run."""
    report: bool = True
    """At the end, write samples/ of what the model says and report.html."""

    def __post_init__(self) -> None:
        finite_fields(self)
        at_least = {
            "epochs": 1, "batch_size": 1, "grad_accumulation": 1, "lr": 0.0, "min_lr": 0.0,
            "weight_decay": 0.0, "workers": 0, "log_every": 1,
            "eval_every": 1, "checkpoint_every": 0, "keep": 1, "seed": 0,
            "save_attention_every": 0,
        }  # fmt: skip
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {least}")
        if self.stop_on_alarm and not self.save_attention_every:
            raise ValueError(
                "stop_on_alarm needs looks that can warn: set save_attention_every, such as to 50"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) must not exceed lr ({self.lr})")
        if self.warmup_epochs is not None and not 0 <= self.warmup_epochs <= self.epochs:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs}) must lie in [0, epochs = {self.epochs}]"
            )
        for name in ("clip_grad", "layer_decay"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} ({value}) must be positive, or None")
        if self.layer_decay is not None and self.layer_decay > 1:
            raise ValueError(f"layer_decay ({self.layer_decay}) must not exceed 1")
        if not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay ({self.ema_decay}) must lie between 0 and 1")

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, the default filled in."""
        return min(5.0, self.epochs / 10) if self.warmup_epochs is None else self.warmup_epochs

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
