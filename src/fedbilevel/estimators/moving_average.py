r"""Moving average: d_t = (1 - a) d_{t-1} + a G(w_t; s_t)."""

from fedbilevel import _tree
from fedbilevel.estimators._base import AbstractEstimator, blockwise


class MovingAverage(AbstractEstimator):
    """Exponential average of the samples; weight 1 is plain."""

    def __call__(self, G, point, previous, direction, weight):
        """Return d_t for weight a, and the sample."""

        def combine(a, d, g):
            return _tree.add_scaled(_tree.scale(1 - a, d), a, g)

        sample = G(point)
        return blockwise(combine, weight, direction, sample), sample
