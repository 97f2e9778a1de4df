r"""FedAdam on the lower level at the given x: FedAvg with Adam's step on the server.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of clients. Client k from y:

    y_k = y;  p times:  y_k <- y_k - lr gy_k(x, y_k; zeta)
Server, which keeps m and v, in every coordinate:
    Delta = mean over S of y_k - y
    m <- beta1 m + (1 - beta1) Delta,     v <- beta2 v + (1 - beta2) Delta^2
    y <- y + lr_server m / (sqrt(v) + tau)

m begins at 0 and v at tau^2, and neither is corrected for that. The server's step is as
long for small changes as for large ones, down to tau, so that its length must suit the
lower level; the limit is FedAvg's.

Exchanges a round: 1, with dy floats each way; x is sent once, m and v never.

Reference: Reddi et al., arXiv 2003.00295 (ICLR 2021).
Deviations: none known. `optax.adam` in a `ServerOptimizer` corrects m and v for their
start, and is another method in the first rounds. Clients are weighted as their data are
(`ClientData.weights`), equally by default.
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms._level import descended, without_x
from fedbilevel.algorithms._local import Iterate, check_counts
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, is_known, number

__all__ = ["FedAdam"]


class Moments(eqx.Module):
    """A point, and the server's averages of its changes and of their squares."""

    point: Pair
    m: Pair
    v: Pair


class FedAdam(AbstractAlgorithm):
    """Local steps on y at the given x; the server scales its step as Adam does."""

    reference: ClassVar[str] = "Reddi et al. 2021, arXiv 2003.00295"
    provenance: ClassVar[str] = "standard method; maintained programs are known"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr gy on a client", step="lower")
    lr_server: Number = number(
        "the server's step of a coordinate", step="lower", default=0.1
    )
    beta1: Number = number("m keeps beta1 of itself a round", default=0.9)
    beta2: Number = number("v keeps beta2 of itself a round", default=0.99)
    tau: Number = number("added to sqrt(v); v begins at its square", default=1e-3)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if is_known(value) and not 0 <= float(value) < 1:
                raise InvalidInputError(
                    f"`FedAdam({name}=...)` must be in [0, 1), got {value:.4g}."
                )
        if is_known(self.tau) and not float(self.tau) > 0:
            raise InvalidInputError(
                f"`FedAdam(tau=...)` must be above 0, got {self.tau:.4g}."
            )

    def init_server(self, x: Upper, y: Lower) -> Moments:
        """Start at (x, y) with m = 0 and v = tau^2."""

        def first(leaf: Array) -> Array:
            return jnp.full_like(leaf, self.tau.astype(leaf.dtype) ** 2)

        zeros = Pair(None, _tree.zeros_like(y))
        return Moments(Pair(x, y), zeros, jax.tree.map(first, zeros))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def phases(self) -> Phases:
        """Return the one exchange of a round; m and v stay on the server."""
        return (Phase("local", _sent, self.local, self.step, without_x, moves=True),)

    def point(self, server: Moments) -> Pair:
        """Return x and the server's y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        return client, descended(message, self.lr, oracle, turn, self.local_steps)

    def step(self, server: Moments, mean: Iterate) -> Moments:
        """Make the server's step."""
        y = Pair(None, server.point.y)
        change = _tree.subtract(mean.point, y)
        squares = jax.tree.map(jnp.square, change)
        m = _mixed(self.beta1, server.m, change)
        v = _mixed(self.beta2, server.v, squares)

        def scaled(m: Array, v: Array) -> Array:
            return m / (jnp.sqrt(v) + self.tau.astype(v.dtype))

        y = _tree.add_scaled(y, self.lr_server, jax.tree.map(scaled, m, v))
        return Moments(Pair(server.point.x, y.y), m, v)


def _mixed(beta: Array, old: Pair, new: Pair) -> Pair:
    return _tree.add_scaled(_tree.scale(beta, old), 1 - beta, new)


def _sent(server: Moments) -> Iterate:
    return Iterate(server.point)
