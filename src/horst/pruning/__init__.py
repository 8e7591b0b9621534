"""One-shot pruning, after training: magnitude, Wanda, SparseGPT and OWL on any transformer."""

from horst.pruning.calibration import calibrate
from horst.pruning.levels import sweep
from horst.pruning.magnitude import Magnitude, mask_by_score
from horst.pruning.method import Method, Statistic
from horst.pruning.one_shot import prune
from horst.pruning.owl import OWL
from horst.pruning.report import PrunedLayer, Report
from horst.pruning.sparsegpt import Hessian, SparseGPT, compensate, inverse_factor
from horst.pruning.wanda import InputNorms, Wanda, wanda_scores

__all__ = [
    "OWL",
    "Hessian",
    "InputNorms",
    "Magnitude",
    "Method",
    "PrunedLayer",
    "Report",
    "SparseGPT",
    "Statistic",
    "Wanda",
    "calibrate",
    "compensate",
    "inverse_factor",
    "mask_by_score",
    "prune",
    "sweep",
    "wanda_scores",
]
