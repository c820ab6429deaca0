"""The training loop: `fit`, and the few functions it is made of.

The loss stays in the recipe: `step_fn(model, batch)` returns the mean loss over a batch. What is
decided here, once, are the weight of each sample under accumulation and over processes, the
learning rate per update, clipping, averaging, the health check, what a checkpoint holds and when to
stop.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from zoo.engine.batches import Batch, BatchPlan, Loader, MicroBatch, Source, move
from zoo.engine.checkpoint import (
    forget_after,
    list_checkpoints,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from zoo.engine.optim import EMA, adamw, set_lr, warmup_cosine
from zoo.engine.run import Run, on_main
from zoo.engine.tracking import Progress, Tracking, write_json
from zoo.rng import derive_seed
from zoo.temperature import ScheduleFn

StepFn = Callable[[nn.Module, Batch], torch.Tensor]
PrepareFn = Callable[[Batch], Batch]
EvaluateFn = Callable[[nn.Module], "dict[str, float] | None"]
AfterFn = Callable[[nn.Module, int], "Mapping[str, float] | None"]
Window = Iterable["tuple[MicroBatch, Batch]"]


class NonFiniteError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


class Interrupted(Exception):
    """A signal or an alarm asked to stop; the state has been saved."""


@dataclass
class Position:
    """How far a run has come; sums are over the epoch, `recent` ones since the last row."""

    epoch: int = 0
    update: int = 0  # within the epoch
    step: int = 0  # updates since the start
    samples: int = 0
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    recent_loss: float = 0.0
    recent_count: int = 0
    overflows: int = 0  # consecutive updates skipped by fp16 loss scaling
    best: float | None = None
    best_epoch: int | None = None


@dataclass
class Training:
    """The parts of a running `fit`."""

    run: Run
    model: nn.Module  # bare
    parameters: list[nn.Parameter]
    wrapped: nn.Module  # as prepared by Accelerate
    optimizer: Any
    ema: EMA | None
    step_fn: StepFn
    schedule_fn: ScheduleFn | None
    after_update: AfterFn | None
    loader: Loader
    position: Position
    tracking: Tracking
    progress: Progress
    started: float
    metrics: dict[str, float]  # of the last evaluation

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are evaluated and saved: the average, if there is one."""
        return self.ema.module if self.ema else self.model

    @property
    def total(self) -> int:
        return self.run.options.epochs * self.loader.plan.updates_per_epoch

    def wall_seconds(self) -> float:
        return self.position.wall_seconds + time.perf_counter() - self.started


def fit(
    run: Run,
    model: nn.Module,
    step_fn: StepFn,
    source: Source,
    evaluate_fn: EvaluateFn,
    *,
    prepare_fn: PrepareFn | None = None,
    schedule_fn: ScheduleFn | None = None,
    after_update: AfterFn | None = None,
    lead: bool = False,
    head_lr: float | None = None,
    best: str = "val/top1",
    save_model: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, Any]:
    """Trains `model` and returns the content of summary.json.

    Args:
        run: From `start_run`; its options decide everything not given here.
        model: On the CPU, not wrapped.
        step_fn: `(model, batch) -> mean loss over the batch`, with the wrapped model. Batches have
            the source's tensors on the device, and `epoch`, `index` and `size` of the micro-batch.
        source: Training data.
        evaluate_fn: `(bare model) -> metrics`; None where it was asked to stop.
        prepare_fn: `(batch) -> batch` for `step_fn`, on the device and some batches ahead: what
            needs no model (normalising, mixing). Random numbers only by (epoch, index).
        schedule_fn: `(bare model, progress)` before each update, with 0 at the first and 1 at the
            last: for what changes over a run besides the learning rate.
        after_update: `(bare model, step)` after each update, on every process: for bounds on
            parameters, and for looking inside. Steps count from 1. Numbers that it returns on the
            main process are logged at that step.
        lead: Batches start with the sample before them (for `Mixing`).
        head_lr: Peak learning rate of the classifier; that of the options by default.
        best: Metric whose highest value marks the best checkpoint.
        save_model: `(model, folder)` writes the trained model; `zoo.save_pretrained` by default.

    Raises:
        NonFiniteError: NaN or infinity in the loss or the gradient.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, 3 after `Run.stop`; everything is saved.
    """
    training = _prepare(
        run, model, step_fn, source, prepare_fn, schedule_fn, after_update, lead, head_lr
    )
    training.progress.say(_opening(training))
    try:
        with run.signals():
            status = _epochs(training, evaluate_fn, best)
            if run.accelerator.is_main_process:
                (save_model or _save_pretrained)(training.evaluated, run.folder / "model")
            summary = _summarize(training, status, best)
            run.accelerator.wait_for_everyone()
    except BaseException:
        _summarize(training, "failed", best)
        raise
    finally:
        training.progress.close()
        run.close()
    run.accelerator.end_training()
    if status != "completed":
        alarm = run.stop_reason and " What an alarm advises needs a new run, with another --out."
        training.progress.say(
            f"{status.replace('interrupted', 'stopped')} at step {training.position.step}; "
            f"everything is saved.{alarm} Continue with:\n  {run.resume_command}"
        )
        sys.exit(run.exit_code)
    training.progress.say(_closing(training, best))
    return summary


def _opening(training: Training) -> str:
    position, run = training.position, training.run
    if position.step == training.total:
        return f"{run.folder} is complete; nothing is left to train"
    where = f" from step {position.step} of {training.total}" if position.step else ""
    trainable, params = trainable_parameters(training.model)
    part = f" {trainable:,} of {params:,} parameters" if trainable < params else ""
    return f"{'resuming' if position.step else 'training'}{part} in {run.folder}{where}"


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters learn, and how many there are."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)


def _closing(training: Training, best: str) -> str:
    position, folder = training.position, training.run.folder
    found = position.best_epoch is not None
    return f"the trained model is in {folder / 'model'}" + (
        f"; best {best} {position.best:.4g} after epoch {position.best_epoch}: "
        f"--model {folder} --checkpoint best"
        if found and position.best_epoch != position.epoch
        else ""
    )


def _prepare(
    run: Run,
    model: nn.Module,
    step_fn: StepFn,
    source: Source,
    prepare_fn: PrepareFn | None,
    schedule_fn: ScheduleFn | None,
    after_update: AfterFn | None,
    lead: bool,
    head_lr: float | None,
) -> Training:
    """Puts the parts together and restores the checkpoint of a resumed run."""
    options, accelerator = run.options, run.accelerator
    plan = BatchPlan(
        num_samples=len(source),
        batch_size=options.batch_size,
        grad_accumulation=options.grad_accumulation,
        world=accelerator.num_processes,
        rank=accelerator.process_index,
        seed=options.seed,
    )

    def prepare(batch: Batch) -> Batch:
        batch = move(batch, accelerator.device)
        return prepare_fn(batch) if prepare_fn else batch

    pin = accelerator.device.type == "cuda"
    loader = Loader(
        source, plan, workers=options.workers, lead=lead, pin_memory=pin, prepare=prepare
    )
    model.to(accelerator.device).train()
    if options.grad_checkpointing:
        _checkpoint_blocks(model, options.model)
    optimizer = adamw(model, options.lr, options.weight_decay, options.layer_decay, head_lr=head_lr)
    ema = EMA(model, options.ema_decay) if options.ema else None
    _seed(options.seed, accelerator.process_index)
    _allow_unused(run, _unused_parameters(run, model, step_fn, source, prepare, lead))
    run.open()
    if options.compile:
        model.compile()
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    position = _restore(run, model, optimizer, ema, len(source))
    if accelerator.is_main_process:
        forget_after(run.folder / "checkpoints", position.step)
    training = Training(
        run=run,
        model=model,
        parameters=list(model.parameters()),
        wrapped=wrapped,
        optimizer=optimizer,
        ema=ema,
        step_fn=step_fn,
        schedule_fn=schedule_fn,
        after_update=after_update,
        loader=loader,
        position=position,
        tracking=Tracking(accelerator, run.folder, position.step, position.epoch),
        progress=Progress(
            options.epochs * len(source), position.samples, main=accelerator.is_main_process
        ),
        started=time.perf_counter(),
        metrics=run.checkpoint[1]["metrics"] if run.checkpoint else {},
    )
    _follow_schedule(training, max(0, position.step - 1))  # an evaluation may come first
    return training


def _checkpoint_blocks(model: Any, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:  # torchvision's; some of timm's
        raise ValueError(
            f"{name} has no gradient checkpointing: drop grad_checkpointing"
        ) from error


def _seed(seed: int, rank: int) -> None:
    """Different dropout on each process, the same in each repetition."""
    torch.manual_seed(derive_seed(seed, "train", rank))


def _unused_parameters(
    run: Run, model: nn.Module, step_fn: StepFn, source: Source, prepare: PrepareFn, lead: bool
) -> list[str]:
    """Trainable parameters that a step leaves without a gradient, tried on one small batch.

    Asked only on several processes, where DistributedDataParallel must know them beforehand.
    Buffers and random numbers are left as they were.
    """
    if run.accelerator.num_processes == 1:
        return []
    buffers = [buffer.clone() for buffer in model.buffers()]
    size = min(len(source), 2)
    keys = [(0, i) for i in ([0] * lead + list(range(size)))]
    batch = prepare({**source.__getitems__(keys), "epoch": 0, "index": 0, "size": size})
    with torch.random.fork_rng(), run.accelerator.autocast():
        step_fn(model, batch).backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = [name for name, p in trainable if p.grad is None]
    model.zero_grad(set_to_none=True)
    return unused


def _allow_unused(run: Run, names: list[str]) -> None:
    from accelerate.utils import DistributedDataParallelKwargs

    run.accelerator.ddp_handler = DistributedDataParallelKwargs(
        find_unused_parameters=bool(names), gradient_as_bucket_view=True
    )
    if names and run.accelerator.is_main_process:
        print(
            f"warning: {len(names)} trainable parameters take no part in the loss and will not "
            f"learn: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}",
            file=sys.stderr,
        )


def _epochs(training: Training, evaluate_fn: EvaluateFn, best: str) -> str:
    """Trains, evaluates and saves epoch by epoch; returns how it ended."""
    try:
        _each_epoch(training, evaluate_fn, best)
    except Interrupted:
        run = training.run
        run.stop_reason = on_main(run.accelerator, lambda: run.stop_reason)
        return run.status
    return "completed"


def _each_epoch(training: Training, evaluate_fn: EvaluateFn, best: str) -> None:
    options, position = training.run.options, training.position
    while position.epoch < options.epochs:
        _train_epoch(training)
        metrics: dict[str, float] | None = {}
        done = position.epoch + 1
        if done == options.epochs or done % options.eval_every == 0:
            _share_buffers(training)
            metrics = evaluate_fn(training.evaluated)
        if metrics is None:  # asked to stop: the epoch is not over before its evaluation
            _stop(training)
        else:
            _save(training, best=_end_epoch(training, metrics, best))
        if position.epoch < options.epochs and _stop_wanted(training):
            raise Interrupted


def _share_buffers(training: Training) -> None:
    """Gives all processes the main one's running statistics, which are the ones that are saved."""
    from accelerate.utils import broadcast

    if training.run.accelerator.num_processes > 1:
        for buffer in training.evaluated.buffers():
            buffer.copy_(broadcast(buffer.clone()))


def _train_epoch(training: Training) -> None:
    """The updates of one epoch, from where the position stands."""
    every, position = training.run.options.checkpoint_every, training.position
    delayed = _Delayed(training.run.accelerator.device)
    clock = time.perf_counter()
    for window in training.loader.windows(position.epoch, position.update):
        stop = _update(training, window, delayed)
        now = time.perf_counter()
        position.train_seconds += now - clock
        clock = now
        if stop or (every and position.step % every == 0):
            _account(training, delayed.flush())
            if stop:
                _stop(training)
            _save(training)
            clock = time.perf_counter()
    _account(training, delayed.flush())


def _update(training: Training, window: Window, delayed: _Delayed) -> bool:
    """One optimizer update; returns whether a process was asked to stop."""
    accelerator, position = training.run.accelerator, training.position
    lr = _learning_rate(training)
    set_lr(training.optimizer.param_groups, lr)
    _follow_schedule(training, position.step)
    loss, size = _gradient(training, window)
    norm = _gradient_norm(training)
    wish = torch.tensor(float(training.run.stopping()), device=loss.device)
    values = torch.stack([loss, norm.to(loss) / accelerator.num_processes, wish])
    if accelerator.num_processes > 1:
        values = accelerator.reduce(values, "sum")
    stop = _account(training, delayed.push(Record(position.step + 1, lr, size), values))
    # Accelerate's wrapper searches for packages in each step, and is needed for loss scaling only.
    optimizer = training.optimizer if accelerator.scaler else training.optimizer.optimizer
    optimizer.step()
    if training.after_update:
        _log_numbers(training, training.after_update(training.model, position.step + 1))
    for parameter in training.parameters:
        parameter.grad = None
    if training.ema:
        training.ema.update_parameters(training.model)
    position.update += 1
    position.step += 1
    position.samples += size
    return stop


def _follow_schedule(training: Training, step: int) -> None:
    if training.schedule_fn is not None:
        for model in {id(m): m for m in (training.model, training.evaluated)}.values():
            training.schedule_fn(model, step / max(1, training.total - 1))


def _learning_rate(training: Training) -> float:
    options = training.run.options
    factor = warmup_cosine(
        training.position.step,
        training.total,
        warmup=round(options.warmup * training.loader.plan.updates_per_epoch),
        floor=options.min_lr / options.lr if options.lr else 0.0,
    )
    return options.lr * factor


def _gradient(training: Training, window: Window) -> tuple[torch.Tensor, int]:
    """Accumulates the mean gradient of a window.

    Returns:
        This process's share of the mean loss, and the number of samples on all processes.
    """
    accelerator = training.run.accelerator
    total = torch.zeros((), device=accelerator.device)
    size = seen = 0
    for micro, batch in window:
        size = micro.window
        seen += micro.part
        with nullcontext() if seen == size else accelerator.no_sync(training.wrapped):
            loss = training.step_fn(training.wrapped, batch) * micro.weight
            accelerator.backward(loss)
        total += loss.detach() / accelerator.num_processes
    return total, size


def _gradient_norm(training: Training) -> torch.Tensor:
    """The norm of the gradient of an update before it is clipped, once, to `clip_grad`."""
    training.run.accelerator.unscale_gradients()
    limit = training.run.options.clip_grad
    grads = [p.grad for p in training.parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    if limit is not None:
        factor = (limit / (norm + 1e-6)).clamp(max=1)
        # On a CPU it can be looked at, and most updates need no clipping; a GPU would have to wait.
        if factor.device.type != "cpu" or factor < 1:
            torch._foreach_mul_(grads, factor)
    return norm


@dataclass(frozen=True)
class Record:
    """What belongs to the values of an update."""

    step: int
    lr: float
    size: int


class _Delayed:
    """Brings values of an update from the device without making it wait.

    On a GPU they are read while the next update is already queued, one late; on a CPU at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.late = device.type == "cuda"
        self.pending: list[tuple[Record, torch.Tensor, Any]] = []

    def push(self, record: Record, values: torch.Tensor) -> list[tuple[Record, list[float]]]:
        if not self.late:
            return [(record, values.tolist())]
        ready = self.flush()
        host = values.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending = [(record, host, event)]
        return ready

    def flush(self) -> list[tuple[Record, list[float]]]:
        for _, _, event in self.pending:
            event.synchronize()
        ready = [(record, host.tolist()) for record, host, _ in self.pending]
        self.pending = []
        return ready


def _account(training: Training, ready: list[tuple[Record, list[float]]]) -> bool:
    """Checks and logs the values of finished updates; returns whether to stop."""
    position, stop = training.position, False
    for record, (loss, norm, wish) in ready:
        _check_finite(training, record, loss, norm)
        training.run.last = {"loss": loss, "grad_norm": norm}
        position.loss_sum += loss * record.size
        position.loss_count += record.size
        position.recent_loss += loss * record.size
        position.recent_count += record.size
        if record.step % training.run.options.log_every == 0:
            _log_step(training, record, norm)
        training.progress.advance(record.size, loss=f"{loss:.3f}", lr=f"{record.lr:.1e}")
        stop = stop or wish > 0
    return stop


def _log_step(training: Training, record: Record, norm: float) -> None:
    position = training.position
    training.tracking.log(
        {
            "train/loss": position.recent_loss / position.recent_count,
            "train/lr": record.lr,
            "train/grad_norm": norm,
            "train/samples_per_second": _speed(position),
        },
        step=record.step,
        epoch=record.step / training.loader.plan.updates_per_epoch,
    )
    position.recent_loss, position.recent_count = 0.0, 0


def _log_numbers(training: Training, numbers: Mapping[str, float] | None) -> None:
    """Those that `after_update` returned for the update that is being made."""
    if numbers:
        step = training.position.step + 1
        epoch = step / training.loader.plan.updates_per_epoch
        training.tracking.log(numbers, step=step, epoch=epoch)


def _speed(position: Position) -> float:
    return position.samples / position.train_seconds if position.train_seconds else 0.0


def _check_finite(training: Training, record: Record, loss: float, norm: float) -> None:
    """Stops on NaN and infinity; lets fp16 loss scaling skip a few updates, as it is meant to."""
    position = training.position
    if math.isfinite(loss) and math.isfinite(norm):
        position.overflows = 0
        return
    position.overflows += 1
    scaled = training.run.accelerator.scaler is not None
    if math.isfinite(loss) and scaled and position.overflows < 20:
        return
    what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
    saved = list_checkpoints(training.run.folder / "checkpoints")
    raise NonFiniteError(
        f"{what} at step {record.step} (epoch {position.epoch + 1}, "
        f"learning rate {record.lr:.3g}). "
        + (f"Last good checkpoint: {saved[-1]}. " if saved else "No checkpoint was saved before. ")
        + "Try a lower --lr, a longer --warmup-epochs or a smaller --clip-grad."
    )


def _end_epoch(training: Training, metrics: dict[str, float], best: str) -> bool:
    """Logs the epoch and moves to the next one; returns whether it was the best."""
    position, options = training.position, training.run.options
    position.epoch += 1
    training.metrics = metrics or training.metrics
    loss = position.loss_sum / max(1, position.loss_count)
    training.tracking.log(
        {"train/epoch_loss": loss, **metrics}, step=position.step, epoch=position.epoch
    )
    improved = best in metrics and (position.best is None or metrics[best] > position.best)
    if improved:
        position.best, position.best_epoch = metrics[best], position.epoch
    position.update, position.loss_sum, position.loss_count = 0, 0.0, 0
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    training.progress.say(
        f"epoch {position.epoch:>{len(str(options.epochs))}}/{options.epochs}  "
        f"train/loss {loss:.4f}  {numbers}  {_speed(position):,.0f} img/s  "
        f"left {_left(training)}"
    )
    return improved


def _left(training: Training) -> str:
    """Estimated time to the end of the run."""
    done = training.position.step / training.total
    seconds = round(training.wall_seconds() * (1 - done) / done)
    return f"{seconds // 60}:{seconds % 60:02d}"


def _stop_wanted(training: Training) -> bool:
    """Whether any process was asked to stop; all processes get the same answer."""
    accelerator = training.run.accelerator
    wish = torch.tensor(float(training.run.stopping()), device=accelerator.device)
    if accelerator.num_processes > 1:
        wish = accelerator.reduce(wish, "sum")
    return wish.item() > 0


def _stop(training: Training) -> None:
    _save(training)
    raise Interrupted


def _save(training: Training, *, best: bool = False) -> None:
    """Writes a checkpoint: everything that the rest of the run depends on."""
    from accelerate.utils import gather_object

    run, scaler = training.run, training.run.accelerator.scaler
    states = gather_object([rng_state()])
    if run.accelerator.is_main_process:
        position = {**asdict(training.position), "wall_seconds": training.wall_seconds()}
        state = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "ema": training.ema.state_dict() if training.ema else None,
            "scaler": scaler.state_dict() if scaler else None,
            "rng": states,
            "position": position,
            "total": training.total,
            "metrics": dict(training.metrics),
            "num_samples": len(training.loader.source),
            "position_grids": _grids(training.model),
        }
        folder = run.folder / "checkpoints"
        save_checkpoint(folder, training.position.step, state, keep=run.options.keep, best=best)
    run.accelerator.wait_for_everyone()


def _restore(
    run: Run, model: nn.Module, optimizer: Any, ema: EMA | None, num_samples: int
) -> Position:
    """Loads the checkpoint of a resumed run into the parts."""
    if run.checkpoint is None:
        return Position()
    path, state = run.checkpoint
    if state["num_samples"] != num_samples:
        raise ValueError(
            f"{path} belongs to a run on {state['num_samples']} training images; now there are "
            f"{num_samples}"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if ema:
        ema.load_state_dict(state["ema"])
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    set_rng_state(state["rng"][run.accelerator.process_index])
    return Position(**state["position"])


def _summarize(training: Training, status: str, best: str) -> dict[str, Any]:
    """Writes summary.json and returns its content."""
    run, position = training.run, training.position
    trainable, params = trainable_parameters(training.model)
    summary = {
        "recipe": run.recipe,
        "model": run.options.model,
        "data": run.options.data,
        "seed": run.options.seed,
        "epochs": position.epoch,
        "steps": position.step,
        "params": params,
        "trainable_params": trainable,
        "samples_per_second": _speed(position),
        "wall_seconds": training.wall_seconds(),
        "status": status,
        "metrics": training.metrics,
        "best": {best: position.best, "epoch": position.best_epoch},
        **run.notes,
    }
    if run.accelerator.is_main_process:
        write_json(run.folder / "summary.json", summary)
    return summary


def _grids(model: nn.Module) -> dict[str, list[int]]:
    """Grids of learned positions, without which a bare file of weights would have to be guessed."""
    tell = getattr(model, "position_grids", None)
    return {key: list(grid) for key, grid in tell().items()} if callable(tell) else {}


def _save_pretrained(model: nn.Module, folder: Any) -> None:
    from zoo.weights import save_pretrained

    save_pretrained(model, folder)
