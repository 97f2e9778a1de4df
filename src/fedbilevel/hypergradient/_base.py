"""The contract of a hypergradient estimator, and what all of them share."""

import abc
from typing import Any

import equinox as eqx
import jax.random as jr

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Upper
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import check_fields, documented


class Bundle(eqx.Module):
    """The samples of one hypergradient estimate, mutually independent.

    xi serves fx and fy, `cross` (zeta_0) the cross product, `factors` (zeta_1..zeta_Q,
    stacked, or one batch shared by all, or keys to be drawn when used) the Hessian
    products.
    """

    upper: Batch
    cross: Batch
    factors: Any


def frozen_bundle(oracle: Oracle, key: Key) -> Bundle:
    """Draw a bundle whose Hessian products all use one batch."""
    upper, cross, factors = jr.split(key, 3)
    return Bundle(
        oracle.draw_upper(upper), oracle.draw_lower(cross), oracle.draw_lower(factors)
    )


class AbstractHypergradient(eqx.Module):
    """An estimator `(oracle, x, y, bundle) -> tree like x`, and its sample bundle."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Let `help` say what the parameters mean."""
        super().__init_subclass__(**more)
        cls.__doc__ = documented(cls)

    def __check_init__(self) -> None:
        check_fields(self)

    @abc.abstractmethod
    def draw(self, oracle: Oracle, key: Key) -> Any:
        """Draw the sample bundle that `key` stands for."""

    @abc.abstractmethod
    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Any) -> Upper:
        """Estimate the hypergradient at (x, y) with a drawn bundle."""

    def check(self, curvature: float, client: int) -> None:
        """Raise if the estimator fails at this lower curvature; most accept any."""
        del curvature, client


def assemble(
    oracle: Oracle, x: Upper, y: Lower, fx: Upper, z: Lower, bundle: Bundle
) -> Upper:
    """Return fx - jvp[z], the last line of estimators that form z = H^-1 fy."""
    return _tree.subtract(fx, oracle.cross_product(x, y, z, bundle.cross))
