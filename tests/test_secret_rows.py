"""Under masks and noise rows are drawn from a secret that a server does not have."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.experiments.clients import read_channel
from fedbilevel.federation.secure.layout import context_of, question_of
from fedbilevel.federation.site_work import Draws
from fedbilevel.federation.wire import Header, digest, unpack, unpack_start
from fedbilevel.problem.losses import Batch
from fedbilevel.runtime import execute, keys
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import FEDERATION, SETTINGS, of_all_rows, server_of, site_of
from tests.test_lying_server import changed, last_of
from tests.test_second_attack import net_of, numbered

COUNT, ASKED, MORE = 4, 40, 12
GRADIENT = (keys.ROUNDS, 0)  # of FedNest: the mean of one gradient of one row each
ONE_GRADIENT = case_of("fednest").algorithm


def job_of(clients=COUNT, **chosen):
    channel = read_channel(aggregate="secure", **chosen)
    return quadratic_job(ONE_GRADIENT, quadratic_data(clients), channel=channel)


class Liar:
    """A server that asks for gradients at one point, as if many rounds were made."""

    def __init__(self, job):
        self.server, self.asked = server_of(job, net_of(job)), 0
        self.start = self.server.blank().server

    def answers(self, index, shift, asked):
        server, self.asked = self.server, self.asked + 1
        point = jax.tree.map(lambda leaf: leaf + shift, self.start)
        header = server.roster.header("exchange", round=1, exchange=self.asked)
        question = server.exchanges.question(header, point, GRADIENT, index, [*asked])
        return server.exchanges.exchange(question, lambda client: (0, 0))

    def sums(self, indices, shift=0.0, asked=range(COUNT)):
        every = [self.answers(index, shift, asked) for index in indices]
        assert all(sorted(one.taken) == [*asked] for one in every)
        return np.stack([flat(one.reply) for one in every])


def flat(tree):
    return np.concatenate(jax.tree.leaves(tree))


def numbers_of_rows(job):
    """Return a job whose lower rows hold their own numbers."""

    def numbers(leaf):
        row = jnp.arange(leaf.shape[1], dtype=float)
        return jnp.broadcast_to(row.reshape(-1, *[1] * (leaf.ndim - 2)), leaf.shape)

    lower = jax.tree.map(numbers, job.data.lower)
    return replace(job, data=replace(job.data, lower=lower))


def predicted_rows(job, indices):
    """Return how often a server thinks that each row is in each sum, by the seed."""
    columns, known = [], numbers_of_rows(job)
    for client in range(COUNT):
        oracle, drawn = known.oracle(client), []
        for index in indices:
            turn = keys.client_turn(job.key, GRADIENT, client, index)
            rows = oracle.draw_lower(turn.keys(1)[0]).rows
            drawn.append(int(np.ravel(jax.tree.leaves(rows)[0])[0]))
        columns.append(np.eye(int(job.data.lower_sizes[client]))[drawn])
    return np.concatenate(columns, axis=1) / COUNT


def test_a_server_does_not_know_which_rows_are_in_a_sum():
    """With known rows each sum is an equation: 40 of them told all differences."""
    job = job_of()
    sums = Liar(job).sums(range(ASKED + MORE))
    known = predicted_rows(job, range(ASKED + MORE))
    solved = np.linalg.lstsq(known[:ASKED], sums[:ASKED], rcond=None)[0]
    error = known[ASKED:] @ solved - sums[ASKED:]
    assert np.sqrt(np.mean(error**2)) > 0.5 * np.mean(np.std(sums, axis=0))


def gradients(job, client, point):
    """Return what each row of a client would add to a sum."""
    oracle = job.oracle(client)
    rows = [
        jax.tree.map(lambda leaf, n=n: leaf[client, n : n + 1], job.data.lower)
        for n in range(int(job.data.lower_sizes[client]))
    ]
    made = [oracle.lower_gradient(point.x, point.y, Batch(row)) for row in rows]
    return np.stack([flat(one) for one in made])


def test_points_nearby_are_asked_of_other_rows():
    """Else {0, 1, 2, 3} at one point and {0, 1, 2} at the next show site 3's reply."""
    job = job_of()
    liar = Liar(job)
    every = liar.sums(range(10))
    fewer = liar.sums(range(10), 1e-9, range(COUNT - 1))
    differences = COUNT * every - (COUNT - 1) * fewer
    rows = gradients(job, 3, liar.start.point)
    near = np.abs(differences[:, None] - rows).max(axis=2).min(axis=1)
    assert np.median(near) > 1e-3


@pytest.mark.slow
def test_sums_of_secret_rows_are_those_of_all_rows_in_the_mean():
    job = job_of()
    liar = Liar(job)
    sums, point = liar.sums(range(100)), liar.start.point
    exact = np.mean([gradients(job, k, point).mean(axis=0) for k in range(COUNT)], 0)
    assert (np.abs(sums.mean(axis=0) - exact) < 4 * sums.std(axis=0) / 10).all()


def test_no_three_sums_of_all_rows_open_the_reply_of_one_site():
    """Each two of {0, 1, 2}, {0, 3, 4} and {0, 1, 2, 3, 4} differ by two sites."""
    job = of_all_rows(job_of(5))
    liar = Liar(job)
    sets = [0, 1, 2], [0, 3, 4], [0, 1, 2, 3, 4]
    first, second, last = [
        liar.answers(0, 1e-9 * n, some) for n, some in enumerate(sets)
    ]
    # Site 0 refuses the second, which the others may have: two thirds of it.
    assert sorted(first.taken) == [0, 1, 2] and second.refused[0].reason == "cohort"
    assert not last.taken
    assert {one.reason for one in last.refused.values()} == {"cohort"}


@pytest.mark.parametrize("chosen", [{}, {"clip": 1.0, "noise": 3.0}], ids=str)
def test_the_same_question_is_answered_alike_after_a_restart(tmp_path, chosen):
    job = job_of(**chosen)
    net = net_of(job, tmp_path)
    execute(server_of(job, net), 1)
    packet = last_of(net, 10, "exchange")

    def drawn(site, packet=packet):
        header, listed, body = unpack(packet, 1 << 30)
        sent = map(digest, unpack_start(listed, body))
        turn = site._draws.turn(site.work.job, header, sent)
        return jax.random.key_data(turn.key).tolist()

    same = drawn(net.sites[10])
    assert drawn(site_of(job, 0, tmp_path / "0")) == same
    nearby = changed(
        packet, lambda header, leaves: (header, [a + 1e-9 for a in leaves])
    )
    other = drawn(net.sites[10], numbered(packet, 1, repeat=1))
    found = [drawn(net.sites[11]), drawn(net.sites[10], nearby), other]
    found.append(drawn(site_of(job, 0, tmp_path / "new")))
    found.append(drawn(site_of(job, 1, tmp_path / "0")))
    public = keys.client_turn(job.key, (0, 0), 0, 0).key
    found.append(jax.random.key_data(public).tolist())
    assert len({*map(str, [same, *found])}) == 1 + len(found)


def test_names_of_a_question_stay_what_they_are():
    """Or sites of two versions make no sum, and a restarted one draws other rows."""
    clients = {str(k): f"0{k}" for k in range(3)}
    said = {"number": 5, "participants": [0, 1, 2], "keys": clients, "repeat": 1}
    header = Header("exchange", "f", "settings", "", 0, 1, exchange=3, index=2)
    header = replace(header, info={**said, "signatures": clients})
    names = [digest(one) for one in (np.arange(3.0), np.ones((2, 2), np.float32))]
    assert context_of(header, names).hex() == (
        "5af08bb963611c913ebccebd6f1eb75ebd0b3c231e9f80cea1e150fd7c68af86"
    )
    assert question_of(header, names).digest == (
        "3d7ff64af395b0eb9de1dba802eafdc4ecf7ea1e6a969308caef19236e1fed41"
    )
    own: Any = SimpleNamespace(secret=bytes(64))
    turn = Draws(0, own).turn(job_of(), header, names)
    assert jax.random.key_data(turn.key).tolist() == [2713334605, 286435022]


def test_without_masks_and_noise_rows_are_those_of_the_seed():
    job = quadratic_job(ONE_GRADIENT, quadratic_data(COUNT))
    header = Header("exchange", FEDERATION, SETTINGS, "", 0, 1)
    turn = site_of(job, 0)._draws.turn(job, header, [])
    public = keys.client_turn(job.key, (0, 0), 0, 0).key
    assert turn.key == public
    assert turn.lasting is None
