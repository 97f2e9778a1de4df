"""What LocalBSGM and LocalBSGVRM share: parameters, states, the exchange of a round."""

import abc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Turn, when
from fedbilevel.algorithms._local_steps import Iterate, Memory, Sample, local_steps
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import AbstractEstimator
from fedbilevel.hypergradient import AbstractHypergradient, Neumann
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, as_number, as_schedule, describe, is_known

__all__ = ["AbstractLocalBSG"]


class AbstractLocalBSG(AbstractAlgorithm):
    """Fields in the paper's letters.

    `hypergradient` is the client's estimate of grad Phi, `eta` the common step or its
    schedule, `rho1` and `rho2` scale it for x and y, `alpha` and `beta` set the
    momentum weights of u and v, `local_steps` is p, and `warm_start` counts lower
    steps before the first round (one extra exchange that averages y).
    """

    weight_power: ClassVar[int]

    hypergradient: AbstractHypergradient
    eta: Schedule = eqx.field(converter=as_schedule)
    alpha: Float[Array, "..."] = eqx.field(converter=as_number)
    beta: Float[Array, "..."] = eqx.field(converter=as_number)
    rho1: Float[Array, "..."] = eqx.field(converter=as_number)
    rho2: Float[Array, "..."] = eqx.field(converter=as_number)
    local_steps: int = eqx.field(static=True)
    warm_start: int = eqx.field(static=True, default=0)

    @abc.abstractmethod
    def estimator(self) -> AbstractEstimator:
        """Return the filter of both directions."""

    @abc.abstractmethod
    def first_bundles(self) -> int:
        """Return B, the number of bundles averaged at t = 0."""

    @classmethod
    def effective(
        cls,
        hypergradient: AbstractHypergradient,
        *,
        upper_step: float,
        lower_step: float,
        upper_weight: float,
        lower_weight: float,
        local_steps: int,
        eta: Any = 1.0,
        **rest: Any,
    ) -> Self:
        """Build from what a step really does at t = 0; `eta` gives the shape over t.

        x moves by upper_step * u and u keeps 1 - upper_weight of its memory.
        """
        schedule = as_schedule(eta)
        first = schedule(0)
        scale = first**cls.weight_power
        return cls(
            hypergradient,
            schedule,
            alpha=upper_weight / scale,
            beta=lower_weight / scale,
            rho1=upper_step / first,
            rho2=lower_step / first,
            local_steps=local_steps,
            **rest,
        )

    def effective_values(self, t: int = 0) -> dict[str, float]:
        """Return the effective steps and weights at iteration t."""
        step, weight = self.step(t), self._momentum(t)
        return {
            "upper_step": float(step.x),
            "lower_step": float(step.y),
            "upper_weight": float(weight.x),
            "lower_weight": float(weight.y),
        }

    def parameters(self) -> dict[str, Any]:
        """Return the letters and the effective values at t = 0."""
        letters = ("alpha", "beta", "rho1", "rho2")
        return {
            **{letter: float(getattr(self, letter)) for letter in letters},
            "eta": describe(self.eta),
            "hypergradient": describe(self.hypergradient),
            "local_steps": self.local_steps,
            "first_batch": self.first_bundles(),
            "warm_start": self.warm_start,
            "effective": self.effective_values(),
        }

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        return (*_options.LETTERS, *_options.EFFECTIVE, "q", "theta", "warm_start")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective values, whichever are given."""
        rule = Neumann(
            _options.integer(options, "q"), _options.number(options, "theta")
        )
        counts = {
            name: _options.integer(options, name)
            for name in ("warm_start", "first_batch")
            if name in options
        }
        letters = _options.letters(options, clients, local_steps)
        if letters is not None:
            return cls(rule, local_steps=local_steps, **letters, **counts)
        values = _options.effective(options, clients, local_steps)
        return cls.effective(rule, local_steps=local_steps, **values, **counts)

    def __check_init__(self) -> None:
        name = type(self).__name__
        if self.local_steps < 1 or self.warm_start < 0:
            raise InvalidInputError(
                f"`{name}` needs local_steps >= 1 and warm_start >= 0, got "
                f"{self.local_steps} and {self.warm_start}."
            )
        numbers = (self.alpha, self.beta, self.rho1, self.rho2, self.eta(0))
        if not all(is_known(number) for number in numbers):
            return
        alpha, beta, rho1, rho2, eta = (float(number) for number in numbers)
        if not (alpha > 0 and beta > 0 and rho1 >= 0 and rho2 >= 0 and eta > 0):
            raise InvalidInputError(
                f"`{name}` needs alpha, beta, eta > 0 and rho1, rho2 >= 0, got "
                f"alpha={alpha:g}, beta={beta:g}, eta={eta:g}, rho1={rho1:g}, "
                f"rho2={rho2:g}."
            )
        power = "" if self.weight_power == 1 else f"^{self.weight_power}"
        for letter, value in (("alpha", alpha), ("beta", beta)):
            plain = value == 1 and eta == 1
            if value * eta**self.weight_power >= 1 and not plain:
                raise InvalidInputError(
                    f"`{name}`: {letter}*eta{power} = "
                    f"{value * eta**self.weight_power:.4g} must be below 1. With "
                    f"eta={eta:g} use {letter} < {eta**-self.weight_power:.4g}; for "
                    f"local steps without memory set {letter} = eta = 1."
                )

    def step(self, t: Any) -> Pair:
        """Return rho1 eta_t and rho2 eta_t."""
        eta = self._eta(t)
        return Pair(self.rho1 * eta, self.rho2 * eta)

    def weight(self, t: Any) -> Pair:
        """Return the momentum weights at t; the first bundles count 1/B each."""
        momentum = self._momentum(t)
        first = jnp.asarray(1 / self.first_bundles(), momentum.x.dtype)
        return Pair(
            jnp.where(t == 0, first, momentum.x), jnp.where(t == 0, first, momentum.y)
        )

    def _eta(self, t: Any) -> Array:
        # A schedule of another library chooses its own precision.
        return jnp.asarray(self.eta(t), self.rho1.dtype)

    def _momentum(self, t: Any) -> Pair:
        scale = self._eta(jnp.maximum(jnp.asarray(t) - 1, 0)) ** self.weight_power
        return Pair(self.alpha * scale, self.beta * scale)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        return Iterate(Pair(x, y), _tree.zeros_like(Pair(x, y)))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a usable previous point."""
        return Memory(Pair(x, y), jnp.asarray(-2, jnp.int32))

    def setup(self) -> tuple[Phase, ...]:
        """Return the optional warm start of the lower level."""
        if self.warm_start == 0:
            return ()

        def replace(server: Iterate, y: Lower) -> Iterate:
            return eqx.tree_at(lambda s: s.point.y, server, y)

        return (Phase("warm_start", lambda s: s.point, self._warm_start, replace),)

    def phases(self) -> tuple[Phase, ...]:
        """Return the one exchange of a round: p local steps, then averages."""
        return (Phase("local", lambda s: s, self._local, lambda s, mean: mean),)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged iterate."""
        return server.point

    def check(self, curvature: float, client: int) -> None:
        """Ask the hypergradient rule."""
        self.hypergradient.check(curvature, client)

    def _sampled_directions(self, oracle: Oracle, key: Key) -> Callable[[Pair], Pair]:
        for_bundle, for_zeta = jr.split(key)
        bundle = self.hypergradient.draw(oracle, for_bundle)
        zeta = oracle.draw_lower(for_zeta)

        def directions(point: Pair) -> Pair:
            return Pair(
                self.hypergradient(oracle, point.x, point.y, bundle),
                oracle.lower_gradient(point.x, point.y, zeta),
            )

        return directions

    def _local(self, message: Iterate, client: Memory, oracle: Oracle, turn: Turn):
        sample = partial(self._sampled_directions, oracle)
        # A client that missed a round has no previous point on the averaged path; at
        # the received one the correction vanishes and momentum remains.
        current = client.round == turn.round - 1
        previous = _tree.select(current, client.previous, message.point)
        direction = when(
            turn.round == 0,
            lambda: self._other_first_bundles(message, sample, turn),
            lambda: message.direction,
        )
        p = self.local_steps
        iterate, previous = local_steps(
            Iterate(message.point, direction),
            previous,
            (turn.steps(p), turn.keys(p)),
            sample,
            self.estimator(),
            self.weight,
            self.step,
        )
        return Memory(previous, jnp.asarray(turn.round, jnp.int32)), iterate

    def _other_first_bundles(self, message: Iterate, sample: Sample, turn: Turn):
        # The mean of B-1 bundles; the loop adds the B-th with weight 1/B at t = 0.
        others = self.first_bundles() - 1
        if others == 0:
            return message.direction

        def add(total: Pair, key: Key) -> tuple[Pair, None]:
            return _tree.add(total, sample(key)(message.point)), None

        total, _ = jax.lax.scan(add, message.direction, turn.spare_keys(others))
        return _tree.scale(1 / others, total)

    def _warm_start(self, point: Pair, client: Memory, oracle: Oracle, turn: Turn):
        def descend(y: Lower, key: Key) -> tuple[Lower, None]:
            slope = oracle.lower_gradient(point.x, y, oracle.draw_lower(key))
            return _tree.add_scaled(y, -self.step(0).y, slope), None

        return client, jax.lax.scan(descend, point.y, turn.keys(self.warm_start))[0]
