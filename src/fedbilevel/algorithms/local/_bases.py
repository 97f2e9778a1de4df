"""Bases of the family's methods: the blocks that move, directions, replies, wiring."""

from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Triple, Upper
from fedbilevel.algorithms.base import Phase, Phases, Repeat, Turn
from fedbilevel.algorithms.directions import (
    hypergradient_and_slope,
    lower_slope,
    three_directions,
)
from fedbilevel.algorithms.local._parts import OwnNumber, own_number
from fedbilevel.algorithms.one_loop import OneLoop
from fedbilevel.algorithms.one_machine._path import (
    EachStep,
    sampled,
    stepped,
    system_slope,
)
from fedbilevel.algorithms.parts import (
    Iterate,
    Memory,
    Stepping,
    evaluate,
    local_steps,
    move,
    no_memory,
    previous_point,
)
from fedbilevel.channels import Channel, GeometricMedian, Mean, Median, TrimmedMean
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import Storm, at_both
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_schedule, is_known, part, word

# Made when they are asked for: a module computes nothing when it is imported.
ROBUST = {
    "median": Median,
    "geometric-median": GeometricMedian,
    "trimmed-mean": lambda: TrimmedMean(0.2),
    "mean": Mean,
}


class ByHypergradient(OneLoop):
    """Moves x along the client's own hypergradient, y along its lower slope."""

    inverts_locally = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")

    def directions(self, oracle, key, t):
        """Return h_k(.; b_t) and gy_k(.; zeta_t)."""
        return hypergradient_and_slope(self.hypergradient, oracle, key)


class Founding(ByHypergradient):
    """A method with the parameters of the founding paper.

    alpha and beta set the momentum weights of u and v, rho1 and rho2 scale the common
    step eta for x and y. A weight is alpha eta^power, with the power 1 for moving
    averages and 2 for variance-reduced momentum.
    """

    @classmethod
    def power(cls) -> int:
        """Return the power of eta in the momentum weights."""
        metadata = next(one.metadata for one in fields(cls) if one.name == "alpha")
        return metadata["effective"].power

    @classmethod
    def effective(
        cls,
        hypergradient: AbstractHypergradient,
        *,
        upper_step: Any,
        lower_step: Any,
        upper_weight: Any,
        lower_weight: Any,
        eta: Any = 1.0,
        **rest: Any,
    ) -> Any:
        """Build from the effective steps at t = 0. `eta` gives the shape over t.

        x moves by upper_step * u, and u keeps 1 - upper_weight of its memory.
        """
        make: Any = cls
        schedule = as_schedule(eta)
        first = schedule(0)
        scale = first ** cls.power()
        return make(
            hypergradient,
            schedule,
            alpha=upper_weight / scale,
            beta=lower_weight / scale,
            rho1=upper_step / first,
            rho2=lower_step / first,
            **rest,
        )

    def effective_values(self, t: int = 0) -> dict[str, float]:
        """Return the effective steps and weights at iteration t."""
        step, weight = self.step(t), self.weight(max(t, 1))
        return {
            "upper_step": float(step.x),
            "lower_step": float(step.y),
            "upper_weight": float(weight.x),
            "lower_weight": float(weight.y),
        }

    def __check_init__(self) -> None:
        numbers = (self.alpha, self.beta, self.rho1, self.rho2, self.eta(0))
        if not all(is_known(number) for number in numbers):
            return
        name, power = type(self).__name__, self.power()
        alpha, beta, rho1, rho2, eta = (float(number) for number in numbers)
        if not (alpha > 0 and beta > 0 and rho1 >= 0 and rho2 >= 0 and eta > 0):
            raise InvalidInputError(
                f"`{name}` needs alpha, beta, eta > 0 and rho1, rho2 >= 0, got "
                f"alpha={alpha:g}, beta={beta:g}, eta={eta:g}, rho1={rho1:g}, "
                f"rho2={rho2:g}."
            )
        shown = "" if power == 1 else f"^{power}"
        for letter, value in (("alpha", alpha), ("beta", beta)):
            plain = value == 1 and eta == 1
            if value * eta**power >= 1 and not plain:
                raise InvalidInputError(
                    f"`{name}`: {letter}*eta{shown} = {value * eta**power:.4g} must be "
                    f"below 1. With eta={eta:g} use {letter} < {eta**-power:.4g}; for "
                    f"local steps without memory set {letter} = eta = 1."
                )


class ByLinearSystem(OneLoop):
    """Moves x, y and the linear-system variable z, which starts at 0."""

    moves = ("x", "y", "z")

    def directions(self, oracle, key, t):
        """Return the maps nu, omega and q."""
        return three_directions(oracle, key)


class ByLowerSlope(OneLoop):
    """Moves y alone, along its lower slope, at the x that is given."""

    answers = "shared y, x fixed"
    moves = ("y",)

    def directions(self, oracle, key, t):
        """Return gy_k(.; zeta)."""
        return lower_slope(oracle, key)


class Normalized(eqx.Module):
    """The mean direction of a client's local steps, and how many there were."""

    direction: Triple
    steps: Array


class BySums(ByLinearSystem):
    """A method whose clients send sums of directions, along which the server steps."""

    sums = True
    returns_point = False

    def __check_init__(self) -> None:
        if self.fewest_steps > self.local_steps:
            raise InvalidInputError(
                f"`{type(self).__name__}(fewest_steps={self.fewest_steps})`: at most "
                f"local_steps, which is {self.local_steps}."
            )

    def parts(self):
        """Let clients stop after tau_i steps, where they differ."""
        fewest = self.fewest_steps
        return (OwnNumber(fewest, self.local_steps),) if fewest else ()

    def sent(self, end, total, turn):
        """Return q_i, or h_i and tau_i."""
        if not self.normalized:
            return total
        tau = own_number(turn, self.fewest_steps or self.local_steps, self.local_steps)
        number = tau.astype(self.gamma_x.dtype)
        return Normalized(_tree.scale(1 / number, total), number)

    def received(self, server, mean):
        """Make the server's step along q."""
        q = _tree.scale(mean.steps, mean.direction) if self.normalized else mean
        steps = Triple(self.gamma_x, self.gamma_y, self.gamma_z)
        w = move(server.point, steps, q)
        return Iterate(w), _tree.scale(1 / self.local_steps, q)


def rule_of_server() -> Any:
    """Declare the rule that reduces the replies of clients."""
    meaning = "the rule R of the server"
    return word(meaning, tuple(ROBUST), default="median", kw_only=True)


class Robust(EachStep):
    """A method on x, y and z whose replies are reduced by a rule that bears faults."""

    moves = ("x", "y", "z")

    def channel(self) -> Channel:
        """Reduce replies by the rule."""
        return Channel((), ROBUST[self.robust]())


class FromMeanDirection(Stepping):
    """Local recursions on x, y and z that start from the mean direction of all."""

    moves = ("x", "y", "z")

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0)."""
        w = self.variables(x, y)
        return Iterate(w, _tree.zeros_like(w))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a point of an earlier round."""
        return no_memory(self.variables(x, y))

    def setup(self) -> Phases:
        """Return the exchanges that z starts with."""

        def longer(server: Iterate, q: Triple) -> Iterate:
            return replace(server, point=stepped(server.point, self.step(0), q))

        one_term = sampled("start_z", system_slope, longer)
        return (Repeat(self.terms, (one_term,)),) if self.terms else ()

    def phases(self) -> Phases:
        """Return the exchange for the mean directions, and the local recursion."""

        def mean(name: str, field: str, local: Any, **more: Any) -> Phase:
            def up(server: Iterate, reply: Triple) -> Iterate:
                return replace(server, **{field: reply})

            return Phase(name, lambda s: s, local, up, attrgetter(field), **more)

        directions = mean("directions", "direction", self.seen, everyone=True)
        return (directions, mean("local", "point", self.recursion, moves=True))

    def seen(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Return h_i, and keep the point."""
        w, known = message.point, memory.index == turn.index - 1
        weight = jnp.where(known, self.rho, 1.0)
        G = evaluate(three_directions(oracle, turn.keys(1)[0]))
        previous = previous_point(w, memory, turn)
        h, _ = Storm()(G, w, previous, message.direction, weight)
        return Memory(w, jnp.asarray(turn.index, jnp.int32)), h

    def recursion(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Take tau steps along h, updated by the changes of the directions."""
        w, h, steps = message.point, message.direction, self.step(0)

        def iterate(carry: tuple[Triple, Triple, Triple], time: tuple[Any, Key]):
            (w, before, h), (_, key) = carry, time
            now, then = at_both(evaluate(three_directions(oracle, key)), w, before)
            h = _tree.add(h, _tree.subtract(now, then))
            return move(w, steps, h), w, h

        carry = (move(w, steps, h), w, h)
        if self.local_steps > 1:
            carry = local_steps(iterate, carry, turn, self.local_steps - 1)
        return memory, carry[0]
