"""Sections 3 and 4 of the paper: optimizers as operators that compose. Imports torch, nothing else of the package."""

from horst.operators.adam import Adam
from horst.operators.base import (
    Composition,
    Identity,
    Memoryless,
    Operator,
    Scaled,
    State,
    Sum,
    bracket,
)
from horst.operators.mirror import Mirror, dual_step, split_mirror
from horst.operators.norms import L1, L2, LInf, Lp, Norm, Nuclear, Spectral
from horst.operators.potentials import (
    CoshEntropy,
    CustomPotential,
    ElasticNet,
    Entropy,
    Euclidean,
    HyperbolicEntropy,
    Potential,
    SeparablePotential,
    bregman_divergence,
)
from horst.operators.steepest import Steepest

__all__ = [
    "L1",
    "L2",
    "Adam",
    "Composition",
    "CoshEntropy",
    "CustomPotential",
    "ElasticNet",
    "Entropy",
    "Euclidean",
    "HyperbolicEntropy",
    "Identity",
    "LInf",
    "Lp",
    "Memoryless",
    "Mirror",
    "Norm",
    "Nuclear",
    "Operator",
    "Potential",
    "Scaled",
    "SeparablePotential",
    "Spectral",
    "State",
    "Steepest",
    "Sum",
    "bracket",
    "bregman_divergence",
    "dual_step",
    "split_mirror",
]
