r"""Steps in units that a run measures: shares of 1/L1, and of distances moved.

    0.5/L     half of what the curvature of the lower level allows, L1 being followed
              along the run; for theta, and for the steps of y and z
    auto      for a step of x: the distance from the start over the root of the summed
              squares of the directions (DoG, Ivgi, Hinder, Carmon, arXiv 2302.12022)

Such a number stands in a field like any other. `resolved` turns all of them into plain
numbers once something is measured; the listing of a method never sees one.
"""

import abc
import math
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree


class Measured(eqx.Module):
    """Measurements of a run: the curvature L1, and a step of x, the stride."""

    curvature: Float[Array, "..."]
    stride: Float[Array, "..."]


class AbstractRelative(eqx.Module):
    """A number that a run fixes: `share` times, or divided by, what it measures."""

    share: Float[Array, "..."] = eqx.field(converter=partial(jnp.asarray, dtype=float))

    @abc.abstractmethod
    def value(self, measured: Measured) -> Float[Array, "..."]:
        """Return the number."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Write the number as options do."""

    def __repr__(self) -> str:
        """Write it so where its share is known, and not only inside a program."""
        known = eqx.is_array(self.share) and not isinstance(self.share, Tracer)
        return str(self) if known and self.share.ndim == 0 else super().__repr__()

    def __mul__(self, factor: Any) -> "AbstractRelative":
        """Return the number times a plain one."""
        return replace(self, share=self.share * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "AbstractRelative":
        """Return the number over a plain one."""
        return replace(self, share=self.share / divisor)


class OfCurvature(AbstractRelative):
    """A step as a `share` of 1/L1, or, with `times`, a bound of L1 as a multiple."""

    times: bool = eqx.field(static=True, default=False)

    def value(self, measured: Measured) -> Float[Array, "..."]:
        """Return share / L1, or share * L1."""
        curvature = measured.curvature
        return self.share * curvature if self.times else self.share / curvature

    def __rtruediv__(self, number: Any) -> "OfCurvature":
        """Return a plain number over this one."""
        return OfCurvature(number / self.share, times=not self.times)

    def __str__(self) -> str:
        """Write `0.5/L` or `2*L`."""
        return f"{float(self.share)!r}{'*' if self.times else '/'}L"


class OfDistance(AbstractRelative):
    """A step of x as a multiple, `share`, of the stride."""

    def value(self, measured: Measured) -> Float[Array, "..."]:
        """Return share * stride."""
        return self.share * measured.stride

    def __str__(self) -> str:
        """Write `auto` or `0.5*auto`."""
        share = float(self.share)
        return "auto" if share == 1 else f"{share!r}*auto"


def read_relative(text: str, auto: AbstractRelative | None) -> AbstractRelative | None:
    """Read `0.5/L`, `2*L`, `auto` or `0.5*auto`; None if it is none of them.

    `auto` is what that word stands for, None where it stands for nothing.
    """
    if text == "auto":
        return auto
    endings: dict[str, Any] = {
        "/L": OfCurvature,
        "*L": lambda share: OfCurvature(share, times=True),
    }
    if auto is not None:
        endings["*auto"] = lambda share: share * auto
    for ending, made in endings.items():
        try:
            share = float(text.removesuffix(ending))
        except ValueError:
            continue
        if text.endswith(ending) and math.isfinite(share) and share > 0:
            return made(share)
    return None


def is_relative(part: Any) -> bool:
    """Say whether this is a number that a run fixes."""
    return isinstance(part, AbstractRelative)


def relative_kinds(tree: PyTree) -> set[type]:
    """Return the kinds of relative numbers in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=is_relative)
    return {type(leaf) for leaf in leaves if is_relative(leaf)}


def resolved(tree: PyTree, measured: Measured) -> PyTree:
    """Return the tree with plain numbers in the place of relative ones."""

    def plain(leaf: Any) -> Any:
        return leaf.value(measured) if is_relative(leaf) else leaf

    return jax.tree.map(plain, tree, is_leaf=is_relative)
