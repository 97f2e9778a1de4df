"""Names for the shapes that travel through the package."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree
from jaxtyping import Key as KeyOf

from fedbilevel.units import AbstractRelative

Key: TypeAlias = PRNGKeyArray
Keys: TypeAlias = KeyOf[Array, " keys"]  # many of them
Upper: TypeAlias = PyTree[ArrayLike]  # shaped like x
Lower: TypeAlias = PyTree[ArrayLike]  # shaped like y
Rows: TypeAlias = PyTree[Array]  # samples, one per entry of the leading axis
Scalar: TypeAlias = Float[Array, ""]
Loss: TypeAlias = Callable[..., Scalar]
Noise: TypeAlias = Callable[[Key, Rows], Rows]
Metrics: TypeAlias = Callable[..., dict[str, Scalar]]

if TYPE_CHECKING:
    # Fields of this type turn any number into an array, which type checkers do not see.
    Number: TypeAlias = Any
else:
    # One number, many in a sweep; or one that a run fixes.
    Number: TypeAlias = Float[Array, "..."] | AbstractRelative


class AbstractBlocks(eqx.Module):
    """One thing for each block of a point.

    What belongs to one level travels inside of it, so that private blocks are found in
    any message. The field `x` is of the upper level, all other fields are of the lower.
    """


class Pair(AbstractBlocks):
    """One thing for each level: a point (x, y), its directions, or its step sizes.

    `x` is of the upper level, `y` of the lower.
    """

    x: Any
    y: Any


class Triple(AbstractBlocks):
    """A pair `x`, `y` with a third block `z`, shaped like y: the linear system's."""

    x: Any
    y: Any
    z: Any
