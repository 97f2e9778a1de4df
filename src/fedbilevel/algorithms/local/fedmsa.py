r"""FedMSA: local recursions on x, y and z that start from the mean directions.

With the operators of FedBiO's directions, D_i = (nu_i, omega_i, q_i) at w = (x, y, z)
(`fedbio`), for every round e:

    all clients (1 exchange), w_prev being w of the last round:
        h_i = D_i(w; s) + (1 - rho) (h - D_i(w_prev; s)),   D_i(w; s) in the first one
        h   = mean_i h_i
    a cohort (1 exchange), from w_0 = w and h:
        w_1 = w_0 - step h
        v = 1..tau-1:  h <- h + D_i(w_v; s) - D_i(w_{v-1}; s),  w_{v+1} = w_v - step h
        w   = mean_i w_tau

step is alpha for x and beta for y and z; one sample s at both points of a difference.
All clients move along the mean direction, corrected by the changes that they measure.
So with exact oracles the limit is unbiased where clients differ, for any tau. With
tau = rho = 1 it is FedBiO at p = 1.

Before the first round z is a sum of N terms, by N exchanges:
    z <- z - beta mean_i q_i,   from z = 0

Exchanges a round: 2, with 2 (dx + 2 dy) floats each way. Evaluations of D_i: 2 tau.

Reference: Tarzanagh, Li, Sharma, Oymak, arXiv 2306.01648 (FedMSA).
Deviations: the updates were read in the authors' program. It subtracts from h the
direction of client i at w_prev on the samples of the last round. The mean of these is
h, so rho changes nothing there. Here D_i(w_prev) is on the current samples, as in
STORM. With exact oracles the two agree. There z is from a series of FedIHGP, here with
beta in the place of 1/ell and samples of its own for every term. 5 rounds on y alone
before the first one are left out. A client that missed the last round starts as in the
first.
"""

from dataclasses import replace
from operator import attrgetter
from typing import Any

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel.algorithms import (
    Key,
    Lower,
    Number,
    Triple,
    Upper,
    parts,
    three_directions,
)
from fedbilevel.algorithms.base import Phase, Phases, Repeat, Turn
from fedbilevel.algorithms.local._bases import OnLinearSystem
from fedbilevel.algorithms.one_machine._path import sampled, stepped, system_slope
from fedbilevel.algorithms.parts import Iterate, Memory, evaluate, move
from fedbilevel.estimators import Storm, at_both
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number, step

__all__ = ["FedMSA"]


class FedMSA(OnLinearSystem):
    """Local recursions on x, y and z from the mean directions of all clients."""

    reference = "Tarzanagh et al. 2023, arXiv 2306.01648"
    provenance = "updates read in the authors' program"

    alpha: Number = step("upper", "x moves by alpha h")
    beta: Number = step("lower", "y and z move by beta h")
    rho: Number = number("what h forgets of itself in a round", default=0.5)
    terms: int = count("terms of the sum that z starts with, N", default=5, least=0)
    local_steps: int = count("local steps of a round, tau", kw_only=True)

    def of_blocks(self, found):
        """Return alpha for x, and beta for y and z."""
        return Triple(found["x"], found["y"], found["y"])

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0)."""
        w = self.variables(x, y)
        return Iterate(w, _tree.zeros_like(w))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a point of an earlier round."""
        return parts.no_memory(self.variables(x, y))

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
        previous = parts.previous_point(w, memory, turn)
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
            carry = parts.local_steps(iterate, carry, turn, self.local_steps - 1)
        return memory, carry[0]
