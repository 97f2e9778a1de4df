r"""SPIDER: d_t = d_{t-1} + G(w_t; s_t) - G(w_{t-1}; s_t), anew from a large batch.

Fang et al., arXiv 1807.01695. The weight is 1 at a refresh, where d_t = large(w_t), and
0 between; it must be one number, not batched over clients, so that one side runs.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel.estimators._base import AbstractEstimator, at_both

__all__ = ["Spider"]


class Spider(AbstractEstimator):
    """Sum of differences, reset by a large batch."""

    keeps_point: ClassVar[bool] = True

    def __call__(self, G, point, previous, direction, weight, large=None):
        """Return d_t; weight 1 refreshes with `large`, or with G without one."""

        def refresh():
            return (large or G)(point)

        def correct():
            now, before = at_both(G, point, previous)
            return _tree.add(direction, _tree.subtract(now, before))

        return jax.lax.cond(jnp.asarray(weight) >= 1, refresh, correct)
