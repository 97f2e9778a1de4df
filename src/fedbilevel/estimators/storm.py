r"""STORM: d_t = G(w_t; s_t) + (1 - a) (d_{t-1} - G(w_{t-1}; s_t)).

Cutkosky and Orabona, arXiv 1905.10018. The same sample s_t at both points. Weight 1 is
plain; without noise d_t = G(w_t) for any a.
"""

from typing import ClassVar

from fedbilevel import _tree
from fedbilevel.estimators._base import AbstractEstimator, at_both, blockwise


class Storm(AbstractEstimator):
    """Momentum with a variance-reducing correction."""

    keeps_point: ClassVar[bool] = True

    def __call__(self, G, point, previous, direction, weight):
        """Return d_t for weight a, and the sample."""
        now, before = at_both(G, point, previous)

        def combine(a, d, g, g_before):
            return _tree.add_scaled(g, 1 - a, _tree.subtract(d, g_before))

        return blockwise(combine, weight, direction, now, before), now
