r"""Steps that follow the curvature, and a safeguard against steps that are too long.

A wrapper around any method. Its numbers may be relative ones (`fedbilevel.units`): the
wrapper measures what they refer to, along the run, and hands the method plain numbers
in every exchange. With `safeguard`, a diverging run rolls back and continues with
smaller steps, a fixed theta that becomes too large is reported, and y and z get
momentum while they keep moving in one direction. A z that the lower level does not hold
is damped (`curvature.py`). The method's listing knows nothing of this.

More numbers travel than the method says. Down: L1, the damping and the stride of x, if
they are measured, the number of halvings, and the loss of the rounds before. Up: (L_k /
L)^4, the curvature along z, the upper loss, and whether a reply was finite. A round has
one Hessian product and one upper loss more. Ten products come before the first round.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Lower, Pair, Triple, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    Repeat,
    Turn,
    every_phase,
)
from fedbilevel.algorithms.wrappers import base
from fedbilevel.algorithms.wrappers.measured_steps import curvature as _curvature
from fedbilevel.algorithms.wrappers.measured_steps.best import Best
from fedbilevel.algorithms.wrappers.measured_steps.curvature import POWER, Softness
from fedbilevel.algorithms.wrappers.measured_steps.dog_stride import DogStride
from fedbilevel.algorithms.wrappers.measured_steps.exchange import Exchange, Held
from fedbilevel.algorithms.wrappers.measured_steps.momentum import Momentum
from fedbilevel.algorithms.wrappers.measured_steps.plain_steps import (
    Sent,
    fixed_thetas,
    plain,
)
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import Guard
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import Oracle
from fedbilevel.schedules import choice
from fedbilevel.units import OfCurvature, OfDistance, relative_kinds


class Steady(base.Inside):
    """The server's state, and what is measured and kept beside it."""

    curvature: Array | None
    softness: Softness | None
    way: DogStride | None
    guard: Guard | None
    momentum: Momentum | None
    best: Best | None


def steadied(algorithm: AbstractAlgorithm, safeguard: bool = False) -> Any:
    """Wrap a method that needs it: one with relative numbers, or to be guarded.

    A method that says itself when it is over rolls back by itself, too.
    """
    if isinstance(algorithm, SteadySteps) or algorithm.finishes:
        return algorithm
    needed = safeguard or relative_kinds(algorithm)
    return SteadySteps(algorithm, safeguard=safeguard) if needed else algorithm


class SteadySteps(base.AroundServer):
    """A method with steps that follow the curvature, and a safeguard."""

    safeguard: bool = choice("roll back a diverging run", default=True)

    @property
    def follows(self) -> bool:
        """Say whether L1 is measured: steps need it, or a theta is watched."""
        watches = self.safeguard and bool(fixed_thetas(self.algorithm))
        return watches or OfCurvature in relative_kinds(self.algorithm)

    @property
    def paces(self) -> bool:
        """Say whether the stride of x is measured."""
        return OfDistance in relative_kinds(self.algorithm)

    @property
    def pushes(self) -> bool:
        """Say whether y and z may get momentum: their steps follow the curvature.

        What it may spoil a safeguard mends.
        """
        return self.safeguard and OfCurvature in relative_kinds(self.algorithm)

    def init_server(self, x: Upper, y: Lower) -> Steady:
        """Start the method, with nothing measured."""
        server, kind = self.plain().init_server(x, y), base.kind_of_numbers(x)
        way = DogStride.of(x) if self.paces else None
        guard = Guard.of((server, way), self.algorithm.watched(server))
        guard = guard if self.safeguard else None
        curvature = softness = None
        if self.follows:
            curvature = jnp.ones((), kind)
            solves = isinstance(self.algorithm.blocks(server), Triple)
            softness = Softness.of(kind) if solves else None
        best = Best.of(self.algorithm.point(server)) if self.safeguard else None
        return self.begun(Steady(server, curvature, softness, way, guard, None, best))

    def begun(self, state: Steady) -> Steady:
        """Return a state before the first round, to which a run may roll back."""
        if self.pushes:
            blocks = self.algorithm.blocks(state.server)
            state = replace(state, momentum=Momentum.of(blocks))
        if state.guard is None:
            return state
        y = self.algorithm.watched(state.server)
        guard = replace(state.guard, kept=(state.server, state.way), before=y)
        return replace(state, guard=guard)

    def init_client(self, x: Upper, y: Lower) -> Held:
        """Start the method's memory, and the power iteration."""
        vector = Pair(None, _curvature.first_vector(y)) if self.follows else None
        return Held(
            self.plain().init_client(x, y),
            vector,
            jnp.zeros((), base.kind_of_numbers(x)) if self.follows else None,
            jnp.zeros((), jnp.int32) if self.safeguard else None,
        )

    def setup(self) -> Phases:
        """Return the first measurements, and the method's own setup."""
        own = self._wrapped(self.plain().setup(), "setup", None)
        measures = self.follows or self.paces
        return ((self._first_measurement(),) if measures else ()) + own

    def phases(self) -> Phases:
        """Return the method's own, the last of them judged."""
        phases = self.plain().phases()
        return self._wrapped(phases, "phases", len(every_phase(phases)) - 1)

    def events(self, server: Any) -> list[str]:
        """Describe automatic interventions."""
        if server.guard is None:
            return []
        return server.guard.events(_times_of_last(self.plain().phases()))

    def measured(self, server: Any, columns: dict[str, Array], done: Any) -> Any:
        """Remember the best point."""
        if server.best is None:
            return server
        point = self.algorithm.point(server.server)
        return replace(server, best=server.best.seen(point, columns, done))

    def best(self, server: Any) -> Best | None:
        """Return the best point that was measured."""
        return server.best

    def gave_up(self, server: Any) -> str:
        """Say what could not be held, if it was so."""
        return "" if server.guard is None else server.guard.gave_up()

    def plain(self, sent: Sent | None = None, own: Array | None = None) -> Any:
        """Return the method with plain numbers, any where only its shape counts."""
        return plain(self.algorithm, sent or Sent(), own)

    def known(self, server: Steady) -> Sent:
        """Return the numbers that travel with a message, without one."""
        guard, way, softness = server.guard, server.way, server.softness
        damping = None
        if softness is not None and server.curvature is not None:
            damping = softness.damping * server.curvature
        stride = None if way is None else way.stride()
        halvings = None if guard is None else guard.halvings
        loss = None if guard is None else guard.expected()
        return Sent(None, server.curvature, damping, stride, halvings, loss)

    def _first_measurement(self) -> Phase:
        """Return the exchange that measures L1, and the size of the first direction."""

        def local(point: Pair, held: Held, oracle: Oracle, turn: Turn):
            for_curvature, for_slope = turn.spare_keys(2)
            v, size = _curvature.begun(oracle, point, for_curvature)
            slope = None
            if self.paces:
                rule = Neumann(5, 0.5 / size)
                bundle = rule.draw(oracle, for_slope)
                slope = _tree.norm(rule(oracle, point.x, point.y, bundle))
            if self.follows:
                own: Any = held.curvature
                own = size.astype(own.dtype)
                held = replace(held, vector=Pair(None, v), curvature=own)
            return held, (size**POWER, slope)

        def up(server: Steady, mean: Any) -> Steady:
            power, slope = jax.tree.map(jnp.asarray, mean)  # a site's are NumPy's
            way = server.way
            if way is not None and slope is not None:
                way = way.began(slope)
            curvature = server.curvature
            if curvature is not None:
                curvature = (power ** (1 / POWER)).astype(curvature.dtype)
            return self.begun(replace(server, curvature=curvature, way=way))

        return Phase("curvature", lambda s: self.point(s), local, up)

    def _wrapped(self, phases: Phases, stage: str, judged: int | None) -> Phases:
        numbers = iter(range(len(every_phase(phases))))

        def change(phase: Phase) -> Phase:
            number = next(numbers)
            return Exchange(self, stage, number, number == judged).phase(phase)

        return base.mapped(phases, change)


def _times_of_last(phases: Phases) -> int:
    """Return how often the last phase, which judges, is in a round at most."""
    last = phases[-1]
    return last.times * _times_of_last(last.phases) if isinstance(last, Repeat) else 1
