r"""Plain: d_t = G(w_t; s_t)."""

from typing import ClassVar

from fedbilevel.estimators._base import AbstractEstimator


class Plain(AbstractEstimator):
    """No memory."""

    keeps_direction: ClassVar[bool] = False

    def __call__(self, G, point, previous, direction, weight):
        """Return G(w_t) as both; the weight is not used."""
        sample = G(point)
        return sample, sample
