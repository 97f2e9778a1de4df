"""Checks of a method of one's own before it is traced: one sentence for a mistake.

Nothing is computed: every function of the method is asked for shapes alone, in the
order of a run, so that the first one that breaks the contract is named.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel.algorithms import (
    AbstractAlgorithm,
    Gathered,
    Phase,
    Repeat,
    ServerTurn,
    Turn,
    every_phase,
)
from fedbilevel.algorithms.wrappers.base import AbstractWrapper
from fedbilevel.channels import weighted_mean
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime.exchange import Link, for_place
from fedbilevel.runtime.job import Job, strongly_typed
from fedbilevel.units import relative_kinds

_PACKAGE = __name__.partition(".")[0]


def require_method(given: Any) -> Any:
    """Return what was given as an algorithm, if it is one."""
    if isinstance(given, AbstractAlgorithm):
        return given
    name = given.__name__ if isinstance(given, type) else f"{given!r:.40}"
    raise InvalidInputError(
        f"algorithm={name}: give a method with its numbers, such as "
        "`fedbilevel.FedBiOControls(local_steps=5)`."
    )


def check_method(job: Job) -> None:
    """Raise `InvalidInputError` where a method of somebody's own breaks the contract.

    Those of the package are tested. Within wrappers the method itself is looked at,
    unless its steps have no numbers before a wrapper has measured them.
    """
    own = job.algorithm
    while isinstance(own, AbstractWrapper):
        own = own.algorithm
    if type(own).__module__.partition(".")[0] == _PACKAGE:
        return
    _Check(job, job.algorithm if relative_kinds(own) else own, type(own)).run()


class _Check:
    """One walk through setup and round, on shapes."""

    def __init__(self, job: Job, algorithm: AbstractAlgorithm, kind: type) -> None:
        self.job, self.algorithm, self.kind = job, algorithm, kind
        self.start = (job.x, job.y)

    def run(self) -> None:
        """Ask every function of the method for its shapes."""
        algorithm = self.algorithm
        server = self._first_state("init_server(x, y)", algorithm.init_server)
        client = self._first_state("init_client(x, y)", algorithm.init_client)
        self._check_point(server)
        stages = {"setup()": algorithm.setup, "phases()": algorithm.phases}
        for title, listed in stages.items():
            for phase in self._phases(title, listed()):
                reply = self._check_local(phase, server, client)
                self._check_up(phase, server, reply)

    def _phases(self, title: str, found: Any) -> list[Phase]:
        """Return the phases of a stage, once they are known to be such."""
        given = found if isinstance(found, tuple | list) else [found]
        wrong = [one for one in given if not isinstance(one, Phase | Repeat)]
        wrong = wrong or ([] if given is found else [found])
        if wrong or not (given or title.startswith("setup")):
            got = f"got {_kind(wrong[0])}" if wrong else "got none"
            expected = "a tuple of `Phase` or `Repeat`"
            raise _broken(self._named(title), expected, got)
        every = every_phase(tuple(given))
        for phase in every:
            if phase.every < 1:
                got = f"but '{phase.name}' has every={phase.every}"
                expected = "phases of every 1 or more rounds"
                raise _broken(self._named(title), expected, got)
        return every

    def _check_point(self, server: PyTree) -> None:
        place, expected = (
            self._named("point(server)"),
            "`Pair(x, y)`, shaped like the start",
        )
        point = self._asked(place, self.algorithm.point, server)
        if not (hasattr(point, "x") and hasattr(point, "y")):
            raise _broken(place, expected, f"got {_kind(point)}")
        found, (x, y) = {"x": point.x, "y": point.y}, self.start
        _require_alike(found, {"x": x, "y": y}, place, expected)

    def _check_local(self, phase: Phase, server: PyTree, client: PyTree) -> PyTree:
        """Check what a client does; return its reply."""
        job, turn = self.job, self._turn(phase)
        mine = Turn(turn.shared, 0, turn.shared)

        def message(server: PyTree) -> PyTree:
            return for_place(phase.message(server, turn), 0)

        def local(message: PyTree, client: PyTree) -> Any:
            return phase.local(message, client, job.oracle(0), mine)

        place = self._named("local(message, client, oracle, turn)", phase)
        sent = self._asked(self._named("down(server)", phase), message, server)
        found = self._asked(place, local, sent, client)
        if not isinstance(found, tuple) or len(found) != 2:
            expected = "a pair, what the client keeps and its reply"
            raise _broken(place, expected, f"got {_kind(found)}")
        kept, reply = found
        expected = "what the client keeps as `init_client` made it"
        _require_alike(kept, client, place, expected)
        return reply

    def _check_up(self, phase: Phase, server: PyTree, reply: PyTree) -> None:
        """Check what the server makes of the mean reply, or of all of them."""
        turn, weights = self._turn(phase), jnp.ones(self.job.cohort(phase))

        def up(server: PyTree, reply: PyTree) -> PyTree:
            many = jax.tree.map(lambda a: jnp.stack([a] * len(weights)), reply)
            mean = weighted_mean(many, weights)
            taken = Gathered(many, weights) if phase.gathers else mean
            return phase.taken_in(server, taken, turn)

        place = self._named("up(server, reply)", phase)
        after = self._asked(place, up, server, reply)
        expected = "the server's state as `init_server` made it"
        _require_alike(after, server, place, expected)

    def _turn(self, phase: Phase) -> ServerTurn:
        return Link(self.job, phase, (0, 0), None).first_turn()

    def _first_state(self, title: str, function: Callable) -> PyTree:
        """Return the shapes of a first state; all of it must be arrays."""

        def arrays() -> PyTree:
            return jax.tree.map(strongly_typed, function(*self.start))

        return self._asked(self._named(title), arrays)

    def _asked(self, place: str, function: Callable, *args: Any) -> Any:
        try:
            return eqx.filter_eval_shape(function, *args)
        except Exception as error:
            told = _told(error, self.kind)
            raise InvalidInputError(f"{place} fails: {told}") from error

    def _named(self, title: str, phase: Phase | None = None) -> str:
        """Name a function of the method, or of one of its phases."""
        inside = f", phase '{phase.name}'" if phase else ""
        return f"`{self.kind.__name__}`{inside}: `{title}`"


def _require_alike(found: PyTree, wanted: PyTree, place: str, expected: str) -> None:
    got = _difference(found, wanted)
    if got:
        raise _broken(place, expected, got)


def _broken(place: str, expected: str, got: str) -> InvalidInputError:
    return InvalidInputError(f"{place} must return {expected}, {got}.")


def _difference(found: PyTree, wanted: PyTree) -> str:
    """Say how shapes differ from those that are expected, by the first leaf."""
    ours, theirs = _leaves(found), _leaves(wanted)
    for name in sorted({*ours, *theirs}):
        got, needed = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if got != needed:
            leaf = f"'{name}'" if name else "it"
            return f"but {leaf} is {got} in place of {needed}"
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return f"got {_kind(found)} in place of {_kind(wanted)}"
    return ""


def _leaves(tree: PyTree) -> dict[str, str]:
    def described(leaf: Any) -> str:
        kind = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        return f"{kind}{list(np.shape(leaf))}"

    names = _tree.leaf_names(tree)
    return dict(zip(names, map(described, jax.tree.leaves(tree)), strict=True))


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _told(error: Exception, kind: type) -> str:
    """Say what was raised, and in which line of the method's own file."""
    first = (str(error).strip().splitlines() or [""])[0]
    told = f"{type(error).__name__}: {first.rstrip('.')}"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if file and frame.filename == file]
    where = f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
    return f"{told}{where}."
