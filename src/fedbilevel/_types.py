"""Names for the shapes that travel through the package."""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

__all__ = [
    "Key",
    "Loss",
    "Lower",
    "Metrics",
    "Noise",
    "Pair",
    "Rows",
    "Scalar",
    "Triple",
    "Upper",
]

Key: TypeAlias = PRNGKeyArray
Upper: TypeAlias = PyTree[Array]  # shaped like x
Lower: TypeAlias = PyTree[Array]  # shaped like y
Rows: TypeAlias = PyTree[Array]  # samples, one per entry of the leading axis
Scalar: TypeAlias = Float[Array, ""]
Loss: TypeAlias = Callable[[Any, Any, Any], Scalar]
Noise: TypeAlias = Callable[[Key, Rows], Rows]
Metrics: TypeAlias = Callable[[Upper, Lower], dict[str, Scalar]]


class Pair(eqx.Module):
    """One thing for each level: a point (x, y), its directions, or its step sizes."""

    x: Any
    y: Any


class Triple(Pair):
    """A pair with a third block z, shaped like y: the linear-system variable."""

    z: Any
