"""Transforms of a client's change before it is sent: privacy, or compression."""

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from fedbilevel._types import Key, Scalar
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import as_number, is_known

Vector = Float[Array, " size"]
_ROUNDING = 1e-9  # so that 0.1 of 30 is 3, though 0.1 * 30 > 3 in floating point


def share_of(fraction: float, count: int) -> int:
    """Return the least whole number that is at least this fraction of `count`."""
    return math.ceil(fraction * count - _ROUNDING)


class AbstractCoder(eqx.Module):
    """Codes one block of a change, as a vector, on the client that sends it.

    `compresses` is True where what travels is no longer a vector of that size.
    """

    compresses: ClassVar[bool] = False

    def start(self, like: jax.ShapeDtypeStruct) -> PyTree:
        """Return what a client remembers of a block before its first exchange."""

    @abc.abstractmethod
    def encode(self, vector: Vector, memory: PyTree, key: Key) -> tuple[Any, PyTree]:
        """Return what travels, and what the client remembers then."""

    def decode(self, coded: Any, like: jax.ShapeDtypeStruct) -> Vector:
        """Return the vector that arrives."""
        return coded

    def why_impossible(self, coded: Any, like: jax.ShapeDtypeStruct) -> str:
        """Return what `encode` would never have sent, or nothing; `coded` is NumPy's.

        Its sender may have written it by hand.
        """
        return ""


class Privacy(AbstractCoder):
    """Clips every block to the norm `clip` and adds Gaussian noise on the client.

    A coordinate of a client's noise has the standard deviation noise * clip / sqrt(n)
    with n participants, so that of their sum has noise * clip: `noise` is the noise
    multiplier of one block. `Job.of` fills in `participants`, n. Results report
    the epsilon that goes with `delta`.

    These are floating-point normal numbers that follow from the run's key: for study in
    the simulator. A deployed site draws discrete ones of its own, see
    `fedbilevel.federation.noise`.
    """

    clip: Float[Array, "..."] = eqx.field(converter=as_number)
    noise: Float[Array, "..."] = eqx.field(converter=as_number, default=0.0)
    participants: int = eqx.field(static=True, default=1)
    delta: float = eqx.field(static=True, default=1e-5)

    def __check_init__(self) -> None:
        if not (is_known(self.clip) and is_known(self.noise)):
            return
        clip, noise = float(self.clip), float(self.noise)
        if not (0 < clip < math.inf and 0 <= noise < math.inf):
            raise InvalidInputError(
                f"`Privacy(clip={clip:g}, noise={noise:g})`: clip must be above 0 and "
                "noise not below 0, both finite."
            )

    def encode(self, vector: Vector, memory: None, key: Key) -> tuple[Vector, None]:
        """Return the clipped vector with this client's share of the noise."""
        clip = self.clip.astype(vector.dtype)
        # Where the norm is below the clip this is 1, without dividing by 0.
        factor = clip / jnp.maximum(jnp.linalg.norm(vector), clip)
        share = self.noise.astype(vector.dtype) * clip / math.sqrt(self.participants)
        draw = jr.normal(key, vector.shape, vector.dtype)
        return factor * vector + share * draw, memory


class Protected(AbstractCoder):
    """Stands in the place of `Privacy` for changes that were clipped and made noisy."""

    def encode(self, vector: Vector, memory: None, key: Key) -> tuple[Vector, None]:
        """Return the vector as it is."""
        return vector, memory


class Sparse(eqx.Module):
    """Some entries of a vector, and where they are."""

    indices: Int[Array, " kept"]
    values: Float[Array, " kept"]


class TopK(AbstractCoder):
    """Sends the largest entries of a block only, with error feedback.

    At least this `fraction` of the entries travels. A client remembers what it has not
    sent yet, and adds it to its next change in the same phase.
    """

    compresses: ClassVar[bool] = True

    fraction: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise InvalidInputError(
                f"`TopK(fraction={self.fraction})`: choose a share above 0, at most 1."
            )

    def start(self, like: jax.ShapeDtypeStruct) -> Vector:
        """Begin with nothing left to send."""
        return jnp.zeros(like.shape, like.dtype)

    def encode(self, vector: Vector, memory: Vector, key: Key) -> tuple[Sparse, Vector]:
        """Return the largest entries of all that is to be sent, and the rest."""
        due = vector + memory
        count = max(1, share_of(self.fraction, due.size))
        _, indices = jax.lax.top_k(jnp.abs(due), count)
        indices = indices.astype(jnp.int32)
        return Sparse(indices, due[indices]), due.at[indices].set(0)

    def why_impossible(self, coded: Sparse, like: jax.ShapeDtypeStruct) -> str:
        """Return whether a place does not exist, or is there twice."""
        places = np.asarray(coded.indices)
        if places.size and not (0 <= places.min() and places.max() < like.size):
            return f"has entries outside of a block of {like.size}"
        return "" if len(np.unique(places)) == places.size else "has an entry twice"

    def decode(self, coded: Sparse, like: jax.ShapeDtypeStruct) -> Vector:
        """Return zeros where nothing was sent."""
        return self.start(like).at[coded.indices].set(coded.values)


class Levels(eqx.Module):
    """A vector as whole numbers of levels, of which `scale` is the highest."""

    scale: Scalar
    levels: Int[Array, " size"]


class Quantize(AbstractCoder):
    """Rounds a block at random to 2^bits - 1 levels between its extremes, unbiased.

    The highest level is the largest entry in absolute value; an entry is off by less
    than one level. A level travels in 8 bits, above 8 `bits` in 16. This is QSGD (arXiv
    1610.02132) with the maximum norm.
    """

    compresses: ClassVar[bool] = True

    bits: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise InvalidInputError(
                f"`Quantize(bits={self.bits})`: choose between 2 and 16 bits."
            )

    @property
    def highest(self) -> int:
        """The highest level; the lowest is its negative."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, vector: Vector, memory: None, key: Key) -> tuple[Levels, None]:
        """Return the extreme, and every entry in levels of it."""
        scale = jnp.max(jnp.abs(vector))
        unit = jnp.where(scale > 0, scale, 1)
        exact = vector / unit * self.highest
        below = jnp.floor(exact)
        up = jr.uniform(key, vector.shape, vector.dtype) < exact - below
        kind = jnp.int8 if self.bits <= 8 else jnp.int16
        return Levels(scale, below.astype(kind) + up.astype(kind)), memory

    def why_impossible(self, coded: Levels, like: jax.ShapeDtypeStruct) -> str:
        """Return whether the scale or a level is out of its range."""
        scale, levels = float(coded.scale), np.asarray(coded.levels)
        if not 0 <= scale < math.inf:
            return f"has the scale {scale:.3g}"
        extremes = int(levels.min(initial=0)), int(levels.max(initial=0))
        if not -self.highest <= extremes[0] <= extremes[1] <= self.highest:
            return f"has levels {extremes}, beyond {self.highest}"
        return ""

    def decode(self, coded: Levels, like: jax.ShapeDtypeStruct) -> Vector:
        """Return the levels as numbers."""
        return coded.levels.astype(like.dtype) * (coded.scale / self.highest)


class BFloat16(AbstractCoder):
    """Rounds every entry to the nearest bfloat16, which travels in 16 bits.

    It has 8 significant bits and the range of float32: an entry is off by 2^-8 of
    itself at most, or by 2^-126 where it is smaller than that.
    """

    compresses: ClassVar[bool] = True

    def rounded(self, numbers: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return numbers of any shape as bfloat16."""
        # A conversion alone would be left out by XLA where the same program undoes it.
        short = jax.lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=7)
        return short.astype(jnp.bfloat16)

    def encode(self, vector: Vector, memory: None, key: Key) -> tuple[Vector, None]:
        """Return the rounded vector."""
        return self.rounded(vector), memory

    def decode(self, coded: Vector, like: jax.ShapeDtypeStruct) -> Vector:
        """Return the rounded numbers in their own type."""
        return coded.astype(like.dtype)
