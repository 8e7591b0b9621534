"""Masks while training: score x pattern x distribution x schedule x state policy, one engine for every method."""

from horst.sparsity.acdc import ACDC
from horst.sparsity.admm import ADMM
from horst.sparsity.ast import AST
from horst.sparsity.at_init import AtInit
from horst.sparsity.cast import CAST
from horst.sparsity.controller import Sparsifier
from horst.sparsity.diagnostics import Recorder
from horst.sparsity.distributions import owl_ratios
from horst.sparsity.gmp import GMP, gmp_steps
from horst.sparsity.imp import IMP, rounds_to
from horst.sparsity.layers import find_layers
from horst.sparsity.masks import magnitude_mask
from horst.sparsity.presets import PRESETS, lrr, safe, sparse_opt, sparse_pretraining, svite
from horst.sparsity.ramps import Ramp
from horst.sparsity.rigl import SET, RigL
from horst.sparsity.schedules import Cubic, DropGrow, Phases, Rounds, acdc_epochs, acdc_steps, rigl_steps
from horst.sparsity.srste import SRSTE
from horst.sparsity.state_policy import StatePolicy
from horst.sparsity.static import Static, keep_zeros

__all__ = [
    "ACDC",
    "ADMM",
    "AST",
    "CAST",
    "GMP",
    "IMP",
    "PRESETS",
    "SET",
    "SRSTE",
    "AtInit",
    "Cubic",
    "DropGrow",
    "Phases",
    "Ramp",
    "Recorder",
    "RigL",
    "Rounds",
    "Sparsifier",
    "StatePolicy",
    "Static",
    "acdc_epochs",
    "acdc_steps",
    "find_layers",
    "gmp_steps",
    "keep_zeros",
    "lrr",
    "magnitude_mask",
    "owl_ratios",
    "rigl_steps",
    "rounds_to",
    "safe",
    "sparse_opt",
    "sparse_pretraining",
    "svite",
]
