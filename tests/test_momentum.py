"""Momentum of y and z, against NumPy: far faster, begun anew, absent in noise."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel._types import Pair, Triple
from fedbilevel.algorithms.wrappers.measured_steps.momentum import Momentum

CURVES = np.asarray([1.0, 0.03, 1e-3])  # of y; those of z are half of that
STEP = 0.25
NOT_BACK = jnp.asarray(False)


def server_at(y, z):
    """Return a server that also carries an x, at this y and z."""
    return Triple(jnp.ones(2), jnp.asarray(y), jnp.asarray(z))


def begun(server):
    """Return the momentum of a server that has y and z."""
    momentum = Momentum.of(server)
    assert momentum is not None
    return momentum


def exact(curves):
    """Return the steps of a round without noise."""
    return lambda u, r: -STEP * curves * u


def listed(steps_at, start, rounds):
    """Return every u_r, the t and the agreement of a block by the listing."""
    u = v = np.asarray(start, float)
    move, agreement, t, every = np.zeros_like(v), 0.0, 0, []
    for r in range(1, rounds + 1):
        steps = steps_at(u, r)
        reached = u + steps
        new = reached - v
        lengths = np.linalg.norm(steps) * np.linalg.norm(move)
        cosine = steps @ move / lengths if lengths else 0.0
        agreement += max(1 / r, 0.02) * (cosine - agreement)
        t = t + 1 if r > 10 and agreement > 0.5 and steps @ new >= 0 else 0
        most = 1.0 if agreement > 0.9 else agreement
        u, v, move = reached + min(t / (t + 3), most) * new, reached, new
        every.append((u, t, agreement))
    return [np.stack(one) for one in zip(*every, strict=True)]


def test_it_is_that_of_the_listing():
    """Rounds of exact slopes of two blocks that curve differently, each on its own."""
    rounds = 600
    y, y_counts, _ = listed(exact(CURVES), [1.0, 2.0, 3.0], rounds)
    z, z_counts, _ = listed(exact(CURVES / 2), [3.0, -1.0, 2.0], rounds)
    server = server_at([1.0, 2.0, 3.0], [3.0, -1.0, 2.0])
    momentum, sent = begun(server), []
    for _ in range(rounds):
        at = server
        moved = server_at(at.y - STEP * CURVES * at.y, at.z - STEP / 2 * CURVES * at.z)
        server, momentum = momentum.pushed(moved, NOT_BACK)
        sent.append((server.y, server.z))
    np.testing.assert_allclose([one[0] for one in sent], y, rtol=0, atol=1e-6)
    np.testing.assert_allclose([one[1] for one in sent], z, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(server.x, 1.0)
    # It began, and was begun anew, in rounds that the two do not share.
    for counts in (y_counts, z_counts):
        began = [now for before, now in zip(counts, counts[1:], strict=False) if before]
        assert 0 in began and max(counts) > 50
    assert (y_counts != z_counts).any()
    # Plain steps shrink the slowest direction by exp(-0.15), these by a hundred.
    assert abs(y[-1][2]) < 0.03 < 3 * (1 - STEP * CURVES[2]) ** rounds


def test_steps_that_agree_in_part_get_a_part_of_it():
    """Noise in slopes keeps the factor at the agreement, however long it lasts."""
    draw = np.random.default_rng(1)
    noise = draw.normal(size=(400, 5))

    def noisy(u, r):
        return 1.0 + 0.8 * noise[r - 1]

    sent, counts, agreement = listed(noisy, np.zeros(5), 400)
    server = server_at(np.zeros(5), np.zeros(5))
    momentum = begun(server)
    for r in range(1, 401):
        moved = replace(server, y=server.y + noisy(server.y, r))
        server, momentum = momentum.pushed(moved, NOT_BACK)
        np.testing.assert_allclose(server.y, sent[r - 1], rtol=1e-5)
    assert counts[-1] > 300 and 0.5 < agreement[-1] < 0.9
    assert float(momentum.speed()) == pytest.approx(1 / (1 - agreement[-1]), rel=1e-4)


def test_moves_that_do_not_agree_stay_as_they_are():
    """Where slopes are mostly noise, a server is what it is, to the bit."""
    draw = np.random.default_rng(0)
    server = server_at(np.zeros(5), np.zeros(5))
    momentum = begun(server)
    for _ in range(300):
        moves = 0.5 + draw.normal(size=(2, 5))
        moved = server_at(server.y + moves[0], server.z + moves[1])
        server, momentum = momentum.pushed(moved, NOT_BACK)
        np.testing.assert_array_equal(server.y, moved.y)
        np.testing.assert_array_equal(server.z, moved.z)


def test_a_run_that_went_back_has_none():
    """The point that it went back to is where the next round begins."""
    server = server_at(np.ones(3), np.ones(3))
    momentum = begun(server)
    for _ in range(200):
        at = server
        moved = server_at(at.y - 1e-3 * at.y, at.z - 1e-3 * at.z)
        server, momentum = momentum.pushed(moved, NOT_BACK)
    assert float(momentum.speed()) == pytest.approx(
        1 + float(momentum.known[0].rounds) / 3, rel=1e-5
    )
    assert float(momentum.speed()) > 10
    back = server_at(np.full(3, 7.0), np.full(3, -7.0))
    server, momentum = momentum.pushed(back, jnp.asarray(True))
    np.testing.assert_array_equal(server.y, 7.0)
    assert float(momentum.speed()) == 1
    np.testing.assert_array_equal(momentum.move.z, 0.0)


def test_what_has_no_z_has_no_momentum():
    """Methods without the variable z go as they are."""
    assert Momentum.of(Pair(jnp.ones(3), jnp.ones(2))) is None
    assert Momentum.of(None) is None
