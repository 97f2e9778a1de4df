"""What the contract of an algorithm offers beyond the mean of a cohort's replies.

Small algorithms, made for one property each, on both runtimes.
"""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel._types import Pair
from fedbilevel.algorithms import (
    AbstractAlgorithm,
    Each,
    Gathered,
    Phase,
    with_turn,
)
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.channels import Channel, Median, Privacy
from fedbilevel.errors import InvalidInputError, StageError
from fedbilevel.problem import Problem
from fedbilevel.runtime import (
    Job,
    Ledger,
    ReferenceRuntime,
    Sampling,
    SimulatorRuntime,
    count,
    execute,
    keys,
)
from fedbilevel.runtime.job import ABSENT, PRESENT
from fedbilevel.runtime.privacy import privacy_spent
from tests.cases import ROWWISE, quadratic_data, quadratic_job

pytestmark = pytest.mark.two_devices

BOTH = pytest.mark.parametrize(
    "runtime",
    [SimulatorRuntime, pytest.param(ReferenceRuntime, marks=pytest.mark.slow)],
)
CLIENTS, PARTICIPANTS = 5, 3


def signature(oracle):
    """Return a number that tells a client by its rows: on a device it has no other."""
    rows = oracle.all_upper()
    return jnp.vdot(rows.weights, rows.rows["b"][:, 0])


def signatures(data):
    """Return the same of all clients, in NumPy."""
    sizes, b = np.asarray(data.upper_sizes), np.asarray(data.upper["b"])[:, :, 0]
    return np.asarray([b[k, : sizes[k]].mean() for k in range(data.clients)])


class Seen(eqx.Module):
    """A point, and what a test wants to know."""

    point: Pair
    told: Any


class AbstractToy(AbstractAlgorithm):
    """A method that moves nothing."""

    reference: ClassVar[str] = "none"
    provenance: ClassVar[str] = "made up"

    def init_client(self, x, y):
        return None

    def point(self, server):
        return server.point


class Coin(AbstractToy):
    """Server and clients draw the same coin, another one in every turn."""

    def init_server(self, x, y):
        return Seen(Pair(x, y), jnp.zeros(2))

    def phases(self):
        def local(sent, client, oracle, turn):
            return client, jr.uniform(turn.shared) + 0 * jr.uniform(turn.key)

        def up(server, mean, turn):
            return Seen(server.point, jnp.stack([mean, jr.uniform(turn.shared)]))

        return (Phase("coin", lambda s: s.point, local, with_turn(up)),)


@BOTH
def test_server_and_clients_share_a_coin(runtime):
    job = quadratic_job(Coin(), quadratic_data(CLIENTS), participants=PARTICIPANTS)
    ends = [execute(runtime(job), rounds).state.server.told for rounds in (1, 2)]
    for mean, own in ends:
        np.testing.assert_allclose(mean, own, rtol=1e-12)
    assert ends[0][0] != ends[1][0]


class Seldom(AbstractToy):
    """One phase in every round, and one in every third, which notes its turns."""

    def init_server(self, x, y):
        return Seen(Pair(x, y), jnp.zeros(3))

    def phases(self):
        def local(sent, client, oracle, turn):
            return client, jnp.asarray(turn.index, float)

        def often(server, mean):
            return Seen(server.point, server.told.at[0].add(1))

        def seldom(server, mean):
            return Seen(server.point, server.told.at[1].add(1).at[2].set(mean))

        def down(server):
            return server.point

        third = Phase("seldom", down, local, seldom, every=3)
        return Phase("often", down, local, often), third


@BOTH
def test_a_phase_may_run_in_some_rounds_alone(runtime):
    job = quadratic_job(Seldom(), quadratic_data(2))
    # Rounds 1, 4 and 7 have it; the third time its turn is 2.
    told = execute(runtime(job), 7).state.server.told
    np.testing.assert_array_equal(told, [7, 3, 2])
    exchanges = Ledger(job).cumulative(job.key, 7)["exchanges"]
    np.testing.assert_array_equal(exchanges, [2, 3, 4, 6, 7, 8, 10])


class Roll(AbstractToy):
    """Every place gets a message of its own, and all replies are kept apart."""

    places: int = eqx.field(static=True)

    def init_server(self, x, y):
        zeros = jnp.zeros(self.places)
        return Seen(Pair(x, y), {"replies": zeros, "ids": zeros, "came": zeros})

    def phases(self):
        def down(server, turn):
            return Each(100.0 * jnp.arange(self.places, dtype=float)), server.point

        def local(sent, client, oracle, turn):
            mine, _ = sent
            return client, mine + signature(oracle)

        def up(server, gathered: Gathered, turn):
            told = {
                "replies": jnp.where(gathered.weights > 0, gathered.replies, -1.0),
                "ids": turn.ids.astype(float),
                "came": turn.present.astype(float),
            }
            return Seen(server.point, told)

        return (Phase("roll", with_turn(down), local, with_turn(up), gathers=True),)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("participants", [PARTICIPANTS, CLIENTS])
def test_messages_differ_and_replies_are_gathered(runtime, participants):
    # Three and five places do not fill two devices evenly.
    data = quadratic_data(CLIENTS)
    job = quadratic_job(Roll(participants), data, participants=participants)
    told = execute(runtime(job), 2).state.server.told
    asked = np.arange(CLIENTS)
    if participants < CLIENTS:
        asked = keys.draw_cohort(job.key, keys.ROUNDS, 0, 1, CLIENTS, participants)
    np.testing.assert_array_equal(told["ids"], asked)
    expected = 100 * np.arange(participants) + signatures(data)[np.asarray(asked)]
    np.testing.assert_allclose(told["replies"], expected, rtol=1e-12)
    np.testing.assert_array_equal(told["came"], 1)


@BOTH
def test_who_stayed_away_is_told_from_who_came(runtime):
    data = quadratic_data(CLIENTS)
    job = quadratic_job(Roll(CLIENTS), data)
    record = np.full((1, CLIENTS), PRESENT, np.uint8)
    record[0, [1, 4]] = ABSENT
    told = execute(runtime(job.replaying(record)), 1).state.server.told
    np.testing.assert_array_equal(told["came"], [1, 0, 1, 1, 0])
    expected = 100 * np.arange(CLIENTS) + signatures(data)
    expected[[1, 4]] = -1
    np.testing.assert_allclose(told["replies"], expected, rtol=1e-12)


def test_what_a_participant_is_sent_is_counted_once():
    job = quadratic_job(Roll(CLIENTS), quadratic_data(CLIENTS))
    found = count(job, 3)
    # A number of its own every time, and the point, which never changes, once.
    assert found["per_client_and_round"]["floats_down"] == 1
    assert found["floats_down"] == CLIENTS * (3 + 2 + 3)


def test_messages_for_another_number_of_participants_are_refused():
    job = quadratic_job(Roll(4), quadratic_data(CLIENTS))
    with pytest.raises(StageError, match="'roll' has messages for 4 .* 5 take"):
        execute(ReferenceRuntime(job), 1)
    with pytest.raises(InvalidInputError, match="'roll' has messages for 4 .* 5 take"):
        execute(SimulatorRuntime(job), 1)


def test_gathered_replies_cannot_be_hidden_or_reduced_otherwise():
    data = quadratic_data(CLIENTS)
    with pytest.raises(InvalidInputError, match="every reply by itself in 'roll'"):
        quadratic_job(Roll(CLIENTS), data, channel=Channel((), Median()))
    spent = []
    for algorithm in (Roll(CLIENTS), Coin()):
        noisy = Channel((Privacy(1.0, 2.0),))
        job = quadratic_job(algorithm, data, channel=noisy)
        spent.append(privacy_spent(job, Ledger(job), 4)["epsilon"])
    # Alone, a reply has only its own share of the noise.
    assert spent[0] > 2 * spent[1]
    cohort = quadratic_job(Roll(PARTICIPANTS), data, participants=PARTICIPANTS)
    with pytest.raises(InvalidInputError, match="Only runs in which all clients"):
        cohort.replaying(np.ones((1, CLIENTS), np.uint8))


class Census(AbstractToy):
    """Asks everyone first, then a cohort."""

    def init_server(self, x, y):
        return Seen(Pair(x, y), {"all": jnp.zeros(3), "some": jnp.zeros(3)})

    def phases(self):
        def local(sent, client, oracle, turn):
            return client, signature(oracle)

        def noting(name):
            def up(server, mean, turn):
                asked = jnp.asarray(turn.ids.shape[0], float)
                note = jnp.stack([mean, asked, turn.share()])
                return Seen(server.point, {**server.told, name: note})

            return with_turn(up)

        return (
            Phase("census", lambda s: s.point, local, noting("all"), everyone=True),
            Phase("survey", lambda s: s.point, local, noting("some")),
        )


@BOTH
def test_a_phase_may_ask_everyone(runtime):
    data = quadratic_data(CLIENTS)
    job = quadratic_job(Census(), data, participants=PARTICIPANTS)
    told, every = execute(runtime(job), 1).state.server.told, signatures(data)
    asked = keys.draw_cohort(job.key, keys.ROUNDS, 1, 0, CLIENTS, PARTICIPANTS)
    np.testing.assert_allclose(told["all"], [every.mean(), CLIENTS, 1.0])
    some, share = every[np.asarray(asked)].mean(), PARTICIPANTS / CLIENTS
    np.testing.assert_allclose(told["some"], [some, PARTICIPANTS, share])


def test_everyone_is_counted_where_everyone_is_asked():
    job = quadratic_job(Census(), quadratic_data(CLIENTS), participants=PARTICIPANTS)
    found = count(job, 2)
    assert found["floats_up"] == 2 * (CLIENTS + PARTICIPANTS)
    assert found["floats_down"] == 2 * (CLIENTS + PARTICIPANTS) * (2 + 3)
    assert found["per_client_and_round"]["floats_up"] == 2


@pytest.mark.slow
def test_a_server_that_projects_bears_private_blocks():
    """`up` sees None where blocks are private: a radius of z must bear that, too."""
    lr = (0.05, 0.1, 0.1)
    algorithm = SimFBO(*lr, *lr, local_steps=2, radius=0.5)
    bare = quadratic_job(algorithm, quadratic_data(3))
    for private in (Pair(False, True), Pair(True, True)):
        problem = Problem(ROWWISE.upper, ROWWISE.lower, private=private)
        job = Job.of(algorithm, problem, bare.data, bare.x, bare.y)
        fast, slow = (execute(r(job), 1) for r in (SimulatorRuntime, ReferenceRuntime))
        for left, right in zip(
            jax.tree.leaves(fast.state), jax.tree.leaves(slow.state), strict=True
        ):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)
        sizes = [
            jnp.linalg.norm(z) for z in jnp.atleast_2d(fast.state.joined().point.z)
        ]
        assert max(sizes) <= 0.5 * (1 + 1e-12)


class Named(AbstractToy):
    """Takes its blocks by name, which private ones do not have on the server."""

    def init_server(self, x, y):
        return Seen(Pair(x, y), None)

    def phases(self):
        def local(sent, client, oracle, turn):
            return client, sent

        def up(server, mean):
            return Seen(Pair(mean.point.x, mean.point.y.sum() + 0 * mean.point.y), None)

        return (Phase("named", lambda s: s, local, up),)


def test_an_up_that_needs_private_blocks_is_told_what_it_sees():
    bare = quadratic_job(Coin(), quadratic_data(3))
    problem = Problem(ROWWISE.upper, ROWWISE.lower, private=Pair(False, True))
    job = Job.of(Named(), problem, bare.data, bare.x, bare.y)
    with pytest.raises(InvalidInputError, match="`up` sees None in the place of every"):
        execute(SimulatorRuntime(job), 1)


def test_phases_that_speak_to_each_client_apart_bear_no_private_blocks():
    bare = quadratic_job(Coin(), quadratic_data(3))
    problem = Problem(ROWWISE.upper, ROWWISE.lower, private=Pair(False, True))
    with pytest.raises(InvalidInputError, match="'roll' speaks to each client apart"):
        Job.of(Roll(3), problem, bare.data, bare.x, bare.y)


def test_everything_drawn_is_drawn_as_asked():
    with pytest.raises(InvalidInputError, match="batch=0: draw at least one row"):
        Sampling(batch=0)
    job = quadratic_job(Coin(), quadratic_data(CLIENTS))
    asked = Sampling(batch=1, participants=CLIENTS + 1)
    with pytest.raises(InvalidInputError, match="between 1 and the 5 clients"):
        Job.of(Coin(), job.problem, job.data, job.x, job.y, sampling=asked)
    assert replace(asked, participants=2).batch == 1
