"""Training: one loop in plain PyTorch, its schedules, checkpoints, evaluation, and many processes."""

from horst.training.checkpoint import CheckpointError
from horst.training.config import LoopConfig
from horst.training.distributed import World, parallelize, processes
from horst.training.evaluate import accuracy, perplexity
from horst.training.interruption import Interrupted
from horst.training.loop import train
from horst.training.lr_schedules import Constant, LRSchedule, OneCycle, Triangular, WarmupCosine
from horst.training.run import NonFiniteLoss, TrainResult
from horst.training.task import BatchSource, Task

__all__ = [
    "BatchSource",
    "CheckpointError",
    "Constant",
    "Interrupted",
    "LRSchedule",
    "LoopConfig",
    "NonFiniteLoss",
    "OneCycle",
    "Task",
    "TrainResult",
    "Triangular",
    "WarmupCosine",
    "World",
    "accuracy",
    "parallelize",
    "perplexity",
    "processes",
    "train",
]
