"""Masks while training: score x pattern x distribution x schedule x state policy, one engine for every method."""

from horst.sparsity.acdc import ACDC
from horst.sparsity.at_init import AtInit
from horst.sparsity.best import Best, BestModels
from horst.sparsity.controller import Event, Sparsifier
from horst.sparsity.diagnostics import Recorder, plot
from horst.sparsity.distributions import owl_ratios
from horst.sparsity.gmp import GMP
from horst.sparsity.imp import IMP
from horst.sparsity.layers import Layer, find_layers
from horst.sparsity.masks import NM, Block, magnitude_mask
from horst.sparsity.rigl import RigL
from horst.sparsity.schedules import (
    Cubic,
    DropGrow,
    Phases,
    Rounds,
    acdc_cifar,
    acdc_epochs,
    acdc_steps,
    rigl_steps,
)
from horst.sparsity.selection import exact_floor, kth_magnitude, smallest
from horst.sparsity.set import SET
from horst.sparsity.srste import SRSTE
from horst.sparsity.state_policy import ACDC_REFERENCE, FIRST_MOMENTS, SECOND_MOMENTS, StatePolicy
from horst.sparsity.static import Static, keep_zeros

__all__ = [
    "ACDC",
    "ACDC_REFERENCE",
    "FIRST_MOMENTS",
    "GMP",
    "IMP",
    "NM",
    "SECOND_MOMENTS",
    "SET",
    "SRSTE",
    "AtInit",
    "Best",
    "BestModels",
    "Block",
    "Cubic",
    "DropGrow",
    "Event",
    "Layer",
    "Phases",
    "Recorder",
    "RigL",
    "Rounds",
    "Sparsifier",
    "StatePolicy",
    "Static",
    "acdc_cifar",
    "acdc_epochs",
    "acdc_steps",
    "exact_floor",
    "find_layers",
    "keep_zeros",
    "kth_magnitude",
    "magnitude_mask",
    "owl_ratios",
    "plot",
    "rigl_steps",
    "smallest",
]
