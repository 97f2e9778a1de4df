r"""Truncated Neumann series for z = H^-1 fy, and three uses of samples.

    H^-1 (I - (I - theta H)^(Q+1)) = theta sum_{i=0..Q} (I - theta H)^i

Q factors give Q+1 terms; theta multiplies the whole sum and must stay below 1/L1.

`Neumann` (Gao 2022, eq. for H-hat; stochastic, nested), zeta_1..zeta_Q independent:

    r = fy(xi), s = r;  for j = Q..1:  r <- r - theta hvp(zeta_j)[r];  s <- s + r
    h = fx(xi) - theta jvp(zeta_0)[s]

`FrozenNeumann`: the same recursion with one batch in place of zeta_1..zeta_Q.
`RandomNeumann` (HIA): m uniform on {0..Q-1}, m factors, z = Q theta r_m: in the mean
the sum of Q terms.

Bias of the first two at most (1 - theta mu)^(Q+1) L0 L1 / mu, of the third the same
with Q for Q+1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _evaluation, _tree
from fedbilevel._types import Key, Lower, Number, Upper
from fedbilevel.hypergradient import _base
from fedbilevel.hypergradient._base import AbstractHypergradient, Bundle, Frozen
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import count, number

_FACTORS = "factors of the Neumann series, Q"


def _fresh_bundle(oracle: Oracle, key: Key, factors: int) -> Bundle:
    upper, cross, rest = jr.split(key, 3)
    keys = jr.split(rest, factors)
    early = _evaluation.current().draws_early
    return Bundle(
        oracle.draw_upper(upper),
        oracle.draw_lower(cross),
        jax.vmap(oracle.draw_lower)(keys) if early else keys,
    )


def _sum(longer: Callable, fy: Lower, zetas: Any, times: int) -> Lower:
    """Return the sum of the terms r <- longer(r, zeta), from r = fy."""

    def add(carry: tuple[Lower, Lower], zeta: Any):
        r, s = carry
        r = longer(r, zeta)
        return (r, _tree.add(s, r)), None

    return _repeat(add, (fy, fy), zetas, times)[1]


def _repeat(longer: Callable, start: Any, samples: Any, times: int) -> Any:
    # Where nothing is compiled JAX has no loop of length zero.
    if times == 0:
        return start
    unroll = min(times, _evaluation.current().unroll)
    return jax.lax.scan(longer, start, samples, length=times, unroll=unroll)[0]


class _AbstractSeries(AbstractHypergradient):
    """A series of `q` factors."""

    q: int = count(_FACTORS, least=0)
    theta: Number = number(
        "step of the Neumann series, below 1/L1", step="lower", least=0
    )

    def check(self, curvature: float, client: int) -> None:
        """Raise if theta is too large for the series."""
        _base.check_step(type(self).__name__, "theta", self.theta, curvature, client)

    def factor(self, oracle: Oracle, x: Upper, y: Lower) -> Callable:
        """Return the map of r to (I - theta H) r, on a batch or the one of a key."""

        def longer(r: Lower, zeta: Batch | Key) -> Lower:
            batch = zeta if isinstance(zeta, Batch) else oracle.draw_lower(zeta)
            product = oracle.hessian_product(x, y, r, batch)
            return _tree.add_scaled(r, -self.theta, product)

        return longer


class Neumann(_AbstractSeries):
    """Stochastic Neumann series with a fresh sample for every factor."""

    def draw(self, oracle: Oracle, key: Key) -> Bundle:
        """Draw xi, zeta_0 and zeta_Q..zeta_1, in the order of their use."""
        return _fresh_bundle(oracle, key, self.q)

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Bundle) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        fx, fy = oracle.upper_gradients(x, y, bundle.upper)
        s = _sum(self.factor(oracle, x, y), fy, bundle.factors, self.q)
        indirect = oracle.cross_product(x, y, s, bundle.cross)
        return _tree.add_scaled(fx, -self.theta, indirect)


class FrozenNeumann(Frozen, _AbstractSeries):
    """Deterministic Neumann series: one batch for all factors."""

    def solved(self, product: Callable[[Lower], Lower], fy: Lower) -> Lower:
        """Return theta times the sum of all terms."""

        def longer(r: Lower, _: None) -> Lower:
            return _tree.add_scaled(r, -self.theta, product(r))

        return _tree.scale(self.theta, _sum(longer, fy, None, self.q))


class RandomNeumann(_AbstractSeries):
    """One random term of the series, scaled by their number.

    The length is part of the bundle, so two points of one bundle use the same. All Q-1
    possible factors are computed and the drawn number of them applied, because under
    `vmap` clients with different lengths would wait for the longest anyway.
    """

    q: int = count(_FACTORS)

    def draw(self, oracle: Oracle, key: Key) -> tuple[Bundle, Array]:
        """Draw the samples and the length."""
        length, rest = jr.split(key)
        bundle = _fresh_bundle(oracle, rest, self.q - 1)
        return bundle, jr.randint(length, (), 0, self.q)

    def __call__(
        self, oracle: Oracle, x: Upper, y: Lower, bundle: tuple[Bundle, Array]
    ) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        samples, length = bundle
        fx, fy = oracle.upper_gradients(x, y, samples.upper)
        factor = self.factor(oracle, x, y)

        def longer(carry: tuple[Lower, Array], zeta: Any):
            r, done = carry
            chosen = _tree.select(done < length, factor(r, zeta), r)
            return (chosen, done + 1), None

        start = (fy, jnp.zeros_like(length))
        r, _ = _repeat(longer, start, samples.factors, self.q - 1)
        indirect = oracle.cross_product(x, y, r, samples.cross)
        return _tree.add_scaled(fx, -self.q * self.theta, indirect)
