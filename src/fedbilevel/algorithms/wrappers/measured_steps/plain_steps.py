"""Plain numbers in the place of relative ones, and shorter ones after a divergence."""

from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedbilevel.algorithms.base import AbstractAlgorithm
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.units import Measured, OfCurvature, OfDistance, resolved

_SHORTER = {"upper": 0.25, "lower": 0.5, "bound": 2.0}  # by one halving
_MEASURED = 0.25  # the power of that for what follows the curvature


class Sent(eqx.Module):
    """A message, with the numbers that make plain steps of relative ones.

    `damping` is that of the system for z, `loss` the upper loss of the rounds before.
    """

    message: PyTree = None
    curvature: Array | None = None
    damping: Array | None = None
    stride: Array | None = None
    halvings: Array | None = None
    loss: Array | None = None


def plain(algorithm: Any, sent: Sent, own: Array | None = None) -> Any:
    """Return a method with plain numbers, any where nothing is measured.

    A client's own series must converge on that client: theta of a hypergradient is by
    its `own` curvature where that is larger.
    """
    one = jnp.ones(())
    stride = one if sent.stride is None else sent.stride
    common = one if sent.curvature is None else sent.curvature
    mine = common if own is None else jnp.maximum(common, own)

    def is_rule(node: Any) -> bool:
        return isinstance(node, AbstractHypergradient)

    rules = jax.tree.map(
        lambda node: resolved(node, Measured(mine, stride)) if is_rule(node) else node,
        algorithm,
        is_leaf=is_rule,
    )
    made = resolved(rules, Measured(common, stride))
    if sent.halvings is None:
        return made
    return _shortened(made, algorithm, sent.halvings)


def fixed_thetas(part: Any) -> list[Array]:
    """Return the theta of every series of a method that is a plain number."""
    found = []
    for one in fields(part):
        value = getattr(part, one.name)
        if one.name == "theta" and not isinstance(value, OfCurvature):
            found.append(value)
        elif isinstance(value, AbstractAlgorithm | AbstractHypergradient):
            found += fixed_thetas(value)
    return found


def largest_share(algorithm: AbstractAlgorithm) -> Array:
    """Return the largest multiple of the stride that a method takes."""
    leaves = jax.tree.leaves(
        algorithm, is_leaf=lambda node: isinstance(node, OfDistance)
    )
    shares = [leaf.share for leaf in leaves if isinstance(leaf, OfDistance)]
    return jnp.max(jnp.stack(shares))


def shorter(step: str, halvings: Array, like: Array) -> Array:
    """Return what a step is multiplied by after some halvings."""
    return jnp.asarray(_SHORTER[step], like.dtype) ** halvings.astype(like.dtype)


def _shortened(part: Any, given: Any, halvings: Array) -> Any:
    """Return an algorithm, or a part of one, with its steps after some halvings.

    `given` is the same with relative numbers.
    """
    changed = {}
    for one in fields(part):
        value = getattr(part, one.name)
        step = one.metadata.get("step", "")
        if step:
            factor = shorter(step, halvings, value)
            if isinstance(getattr(given, one.name), OfCurvature):
                factor = factor**_MEASURED
            changed[one.name] = value * factor
        elif isinstance(value, eqx.Module):
            inner = getattr(given, one.name)
            changed[one.name] = _shortened(value, inner, halvings)
    names, new = list(changed), list(changed.values())
    if not changed:
        return part
    return eqx.tree_at(lambda one: [getattr(one, n) for n in names], part, new)
