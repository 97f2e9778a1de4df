r"""Heavy ball (Polyak): d_t = m d_{t-1} + G(w_t; s_t), with m = 1 - weight.

There is no factor in front of G, so directions are 1/(1-m) times longer than those of a
moving average. Weight 1 is plain.
"""

from fedbilevel import _tree
from fedbilevel.estimators._base import AbstractEstimator, blockwise


class HeavyBall(AbstractEstimator):
    """A decaying sum of the samples."""

    def __call__(self, G, point, previous, direction, weight):
        """Return d_t for momentum 1 - weight, and the sample."""

        def combine(a, d, g):
            return _tree.add_scaled(g, 1 - a, d)

        sample = G(point)
        return blockwise(combine, weight, direction, sample), sample
