"""SET: sparse evolutionary training, RigL with random growth.

References: Mocanu et al., *Scalable training of artificial neural networks with adaptive sparse connectivity inspired
by network science*, 2018.
"""

from __future__ import annotations

from torch import Tensor

from horst.sparsity.layers import Layer
from horst.sparsity.rigl import Exchange


class SET(Exchange):
    """Drop the smallest weights, grow random ones; see :class:`~horst.sparsity.rigl.Exchange` for the arguments.

    The random choice is a hash of seed, exchange and index, so it needs no generator and is equal on every rank.
    """

    def _growth_scores(self, layer: Layer) -> Tensor | None:
        return self._random(self.layers.index(layer))
