"""The contract of a hypergradient estimator, and what all of them share."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.random as jr

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Upper
from fedbilevel.errors import ClientInputError
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import check_fields, documented, is_known


class Bundle(eqx.Module):
    """The samples of one hypergradient estimate, mutually independent.

    xi serves fx and fy, `cross` (zeta_0) the cross product, `factors` (zeta_1..zeta_Q,
    stacked, or one batch shared by all, or keys to be drawn when used) the Hessian
    products.
    """

    upper: Batch
    cross: Batch
    factors: Any


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


class Frozen(AbstractHypergradient):
    """An estimator whose Hessian products all use one batch: the Hessian is a map."""

    def draw(self, oracle: Oracle, key: Key) -> Bundle:
        """Draw xi, zeta_0 and one batch for all products."""
        upper, cross, factors = jr.split(key, 3)
        batches = (oracle.draw_lower(cross), oracle.draw_lower(factors))
        return Bundle(oracle.draw_upper(upper), *batches)

    @abc.abstractmethod
    def solved(self, product: Callable[[Lower], Lower], fy: Lower) -> Lower:
        """Return what stands for H^-1 fy, by the map d -> H d."""

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Bundle) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        fx, fy = oracle.upper_gradients(x, y, bundle.upper)

        def product(d: Lower) -> Lower:
            return oracle.hessian_product(x, y, d, bundle.factors)

        return assemble(oracle, x, y, fx, self.solved(product, fy), bundle)


def check_step(
    name: str, letter: str, step: Any, curvature: float, client: int
) -> None:
    """Raise if the step of a series is too large for the curvature."""
    if is_known(step) and float(step) * curvature >= 1:
        raise ClientInputError(
            client,
            f" L1 is about {curvature:.4g} at the start, so use at most "
            f"{0.99 / curvature:.4g}.",
            f"`{name}({letter}={float(step):.4g})`: the series needs {letter} < "
            "1/L1; on ",
        )
