"""Training through Accelerate, as functions: `start_run`, then `fit`.

Import from here; the modules behind load Accelerate only when a run starts.
"""

from zoo.engine.alarm_log import AlarmLog, watch_options
from zoo.engine.batches import BatchPlan, Loader, MicroBatch
from zoo.engine.checkpoint import CheckpointError
from zoo.engine.command import cli
from zoo.engine.evaluation import collect, evaluate, evaluation_loader
from zoo.engine.loop import NonFiniteError, fit
from zoo.engine.mixing import Mixing
from zoo.engine.optim import EMA, adamw, parameter_groups, warmup_cosine
from zoo.engine.options import TrainOptions
from zoo.engine.run import Run, start_run
from zoo.temperature import temperature_schedule

__all__ = [
    "EMA",
    "AlarmLog",
    "BatchPlan",
    "CheckpointError",
    "Loader",
    "MicroBatch",
    "Mixing",
    "NonFiniteError",
    "Run",
    "TrainOptions",
    "adamw",
    "cli",
    "collect",
    "evaluate",
    "evaluation_loader",
    "fit",
    "parameter_groups",
    "start_run",
    "temperature_schedule",
    "warmup_cosine",
    "watch_options",
]
