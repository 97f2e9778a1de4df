"""A method of one's own that breaks the contract meets one sentence, before a trace."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest

import fedbilevel
from fedbilevel import Pair
from fedbilevel.algorithms import (
    AbstractAlgorithm,
    Each,
    Gathered,
    Phase,
    Repeat,
    with_turn,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime.method_checks import check_method
from tests.cases import quadratic_data, quadratic_job


class State(eqx.Module):
    """A point, and how often it moved."""

    point: Pair
    count: Any


class Own(AbstractAlgorithm):
    """A method that averages y; `broken` says which function is wrong, and how."""

    broken: Any = eqx.field(static=True, default_factory=dict)

    def _or(self, name, value):
        return self.broken[name](value) if name in self.broken else value

    def init_server(self, x, y):
        return self._or("init_server", State(Pair(x, y), jnp.zeros((), jnp.int32)))

    def init_client(self, x, y):
        return {"memory": y}

    def down(self, server):
        return self._or("down", server.point)

    def local(self, point, client, oracle, turn):
        batch = oracle.draw_lower(turn.keys(1)[0])
        slope = oracle.lower_gradient(point.x, point.y, batch)
        return self._or("local", ({"memory": slope}, slope))

    def up(self, server, slope):
        moved = replace(server.point, y=slope)
        return self._or("up", State(moved, server.count + 1))

    def point(self, server):
        return self._or("point", server.point)

    def phases(self):
        return self._or("phases", (Phase("mean", self.down, self.local, self.up),))


@pytest.fixture(scope="module")
def job():
    return quadratic_job(Own(), quadratic_data(3))


def refused(job, **broken):
    with pytest.raises(InvalidInputError) as caught:
        check_method(replace(job, algorithm=Own(broken)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_method_that_keeps_the_contract_passes(job):
    check_method(job)
    check_method(replace(job, algorithm=Own({"phases": lambda p: (Repeat(2, p),)})))


def test_messages_apart_and_replies_gathered_pass(job):
    def apart(server, turn):
        return Each({"place": turn.ids})

    def up(server, gathered):
        assert isinstance(gathered, Gathered) and gathered.weights.shape == (3,)
        return replace(server, count=gathered.replies[0].astype(jnp.int32))

    def local(message, client, oracle, turn):
        assert message["place"].shape == ()
        return client, message["place"].astype(float)

    phase = Phase("apart", with_turn(apart), local, up, gathers=True)
    check_method(replace(job, algorithm=Own({"phases": lambda _: (phase,)})))


LOCAL = r"`local(message, client, oracle, turn)`"
IN_PHASE = "`Own`, phase 'mean': "


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (
            {"local": lambda pair: Pair(*pair)},
            f"{IN_PHASE}{LOCAL} must return a pair, what the client keeps and its "
            "reply, got Pair.",
        ),
        (
            {"local": lambda pair: (None, pair[1])},
            f"{IN_PHASE}{LOCAL} must return what the client keeps as `init_client` "
            "made it, but 'memory' is nothing in place of float64[3].",
        ),
        (
            {"up": lambda state: state.point},
            f"{IN_PHASE}`up(server, reply)` must return the server's state as "
            "`init_server` made it, but 'count' is nothing in place of int32[].",
        ),
        (
            {"up": lambda state: replace(state, count=state.point.y[0])},
            f"{IN_PHASE}`up(server, reply)` must return the server's state as "
            "`init_server` made it, but 'count' is float64[] in place of int32[].",
        ),
        (
            {"phases": lambda phases: phases[0]},
            "`Own`: `phases()` must return a tuple of `Phase` or `Repeat`, got Phase.",
        ),
        (
            {"phases": lambda phases: ()},
            "`Own`: `phases()` must return a tuple of `Phase` or `Repeat`, got none.",
        ),
        (
            {"point": lambda point: (point.x, point.y)},
            "`Own`: `point(server)` must return `Pair(x, y)`, shaped like the start, "
            "got tuple.",
        ),
        (
            {"point": lambda point: Pair(point.y[:1], point.y)},
            "`Own`: `point(server)` must return `Pair(x, y)`, shaped like the start, "
            "but 'x' is float64[1] in place of float64[2].",
        ),
    ],
    ids=["pair", "kept", "state", "dtype", "no tuple", "empty", "no pair", "shape"],
)
def test_what_a_function_must_return(job, broken, told):
    assert refused(job, **broken) == told


def test_what_raises_is_named_with_its_line(job):
    told = refused(job, down=lambda point: point.w)
    start = f"{IN_PHASE}`down(server)` fails: AttributeError: 'Pair' object has no"
    assert told.startswith(start)
    line = int(told.rpartition(" line ")[2].rstrip(".)"))
    assert "(test_method_checks.py" in told and line > 1


def test_within_a_wrapper_the_method_is_named(job):
    wrapped = fedbilevel.SteadySteps(Own({"local": lambda pair: pair[1]}))
    with pytest.raises(InvalidInputError, match=r"^`Own`, phase 'mean': `local\(.*got"):
        check_method(replace(job, algorithm=wrapped))


@pytest.mark.parametrize("given", ["fedbio", fedbilevel.FedBiO], ids=["name", "class"])
def test_what_is_no_method(job, given):
    with pytest.raises(
        InvalidInputError, match=r"^algorithm=.*[bB]i[oO].*: give a method"
    ):
        fedbilevel.run(job.problem, job.data, (job.x, job.y), given, rounds=1)
