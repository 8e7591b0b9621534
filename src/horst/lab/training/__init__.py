"""Training: one loop in plain PyTorch, its schedules, checkpoints, evaluation, and many processes."""

from horst.lab.training.checkpoint import CheckpointError
from horst.lab.training.config import LoopConfig
from horst.lab.training.distributed import World, parallelize, processes
from horst.lab.training.evaluate import accuracy, perplexity
from horst.lab.training.interruption import Interrupted
from horst.lab.training.loop import train
from horst.lab.training.lr_schedules import Constant, LRSchedule, OneCycle, Triangular, WarmupCosine
from horst.lab.training.run import NonFiniteLoss, TrainResult
from horst.lab.training.task import BatchSource, Task

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
