"""The noise of a deployed site: whole steps of a grid, from secret random bits.

Sums of floating-point numbers have low bits that depend on what was added: noise that
is drawn as such numbers differs from the noise that another reply would need.
So a block is cut down to the norm `clip`, put on a grid by rounding its numbers toward
zero, which makes no number and no norm larger, and given discrete Gaussian noise in
steps of that grid. All that leaves a site are whole numbers of steps, whatever the
reply; on them two replies are no further apart than `clip` each from zero, and the
noise has at least the deviation that was asked for.

A step is a power of two, 2^-20 to 2^-21 of the noise's deviation, so that rounding is
far below the noise, and is a multiple of 2^-40, so that masked sums hold it exactly. In
float32 numbers of more than 2^24 steps lose their last digits afterwards, which shows
nothing more. The sum over sites of discrete Gaussian noise is one itself, up to
exp(-2^40) (Kairouz, Liu and Steinke 2021).
"""

import math
import os
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fedbilevel.channels import Privacy, change_blocks
from fedbilevel.channels.discrete_gaussian import Bits, discrete_gaussian
from fedbilevel.errors import InvalidInputError

FINEST = -40  # the exponent of the smallest step, that of masked sums
_STEPS = 20  # binary digits of a deviation in steps
_WIDEST = 2**53  # steps that a double holds exactly
_MARGIN = 1 - 2.0**-30  # more than a norm in double precision can be off


@dataclass(frozen=True)
class SiteNoise:
    """Clips changes and adds this site's share of the noise to them.

    `bits(n)` returns n random bytes, by default those of the operating system.
    """

    privacy: Privacy
    bits: Bits = field(default=os.urandom)

    def __post_init__(self) -> None:
        widest = float(self.privacy.clip) / self.step
        if math.log2(self.step) < FINEST or widest > _WIDEST:
            raise InvalidInputError(
                f"clip={float(self.privacy.clip):g} and "
                f"noise={float(self.privacy.noise):g} leave a site a share of "
                f"{self._share:g}: too little for the grid that noise is drawn on. "
                "Choose more of them, or leave out the noise."
            )

    @property
    def _share(self) -> float:
        """The deviation of one coordinate of this site's noise."""
        clip, noise = float(self.privacy.clip), float(self.privacy.noise)
        return noise * clip / math.sqrt(self.privacy.participants)

    @property
    def step(self) -> float:
        """The distance of neighbors on the grid."""
        return math.ldexp(1.0, math.frexp(self._share)[1] - 1 - _STEPS)

    @property
    def deviation(self) -> int:
        """The deviation of the noise in steps, rounded up."""
        return math.ceil(self._share / self.step)

    def protect(self, change: PyTree) -> PyTree:
        """Return what may leave this site of a change, which must be finite."""
        return change_blocks(change, self._released)

    def _released(self, block: Array) -> Array:
        exact, clip = np.asarray(block, np.float64), float(self.privacy.clip)
        # Scaled first: squares of large numbers would be infinite.
        largest = float(np.max(np.abs(exact), initial=0.0)) or 1.0
        norm = largest * float(np.linalg.norm(exact / largest))
        factor = min(1.0, clip / norm) * _MARGIN if norm > 0 else 1.0
        steps = np.trunc(factor * exact / self.step).astype(np.int64)
        drawn = discrete_gaussian(self.deviation, block.size, self.bits)
        return jnp.asarray(((steps + drawn) * self.step).astype(block.dtype))
