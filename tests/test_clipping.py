"""Changes that are cut to a running quantile of their norms."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel._types import Pair
from fedbilevel.algorithms import Phase, SteadySteps, quantile_clipped
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.wrappers.clip import RATE, _cut, _followed
from fedbilevel.channels import Channel, Median, SecureMean
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import (
    Checkpoints,
    ReferenceRuntime,
    SimulatorRuntime,
    count,
    execute,
)
from tests.cases import (
    DX,
    DY,
    case_of,
    cohort_of,
    data_for,
    of_structures,
    quadratic_data,
    quadratic_job,
)
from tests.federation import Loopback, server_of, site_of
from tests.reference.bent_job import X0, Y0, bent_job, only_rows
from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    lower_gradient,
    upper_gradients,
)

QUANTILE, P, STEPS = 0.6, 2, (0.1, 0.2, 0.15)
FEDBIO = FedBiO(*STEPS, local_steps=P)
CLIPPED = quantile_clipped(FEDBIO, QUANTILE)


# An own program of the recursion -----------------------------------------------------


def directions(w, xi, zeta):
    """Return nu, omega and q on one client's only rows."""
    x, y, z = w
    fx, fy = upper_gradients(x, y, xi)
    q = hessian_product(x, y, z, zeta) - fy
    return fx - cross_product(x, y, z, zeta), lower_gradient(x, y, zeta), q


def shortened(before, after, bounds):
    """Return a point whose blocks moved no further than the bounds, and the norms."""
    norms = [np.linalg.norm(b - a) for a, b in zip(before, after, strict=True)]
    if bounds is None:
        return after, norms
    every = zip(before, after, norms, bounds, strict=True)
    return tuple(a + (b - a) * min(1, C / n) for a, b, n, C in every), norms


def next_bounds(bounds, norms):
    """Return the bounds, from the norms of all clients, of which each is a row."""
    if bounds is None:
        return np.exp(np.mean(np.log(norms), axis=0))
    below = np.mean(np.asarray(norms) <= bounds, axis=0)
    return bounds * np.exp(-0.2 * (below - QUANTILE))


def clipped_fedbio(rows, rounds) -> Any:
    w, of_steps, of_replies = (X0, Y0, np.zeros_like(Y0)), None, None
    for _ in range(rounds):
        ends, step_norms, reply_norms = [], [], []
        for xi, zeta in rows:
            v = w
            for _ in range(P):
                moves = zip(v, STEPS, directions(v, xi, zeta), strict=True)
                v, norms = shortened(v, [a - s * d for a, s, d in moves], of_steps)
                step_norms.append(norms)
            v, norms = shortened(w, v, of_replies)
            reply_norms.append(norms)
            ends.append(v)
        w = tuple(np.mean(block, axis=0) for block in zip(*ends, strict=True))
        of_steps = next_bounds(of_steps, step_norms)
        of_replies = next_bounds(of_replies, reply_norms)
    return w, of_steps, of_replies


@pytest.mark.parametrize(
    ("runtime", "rounds"),
    [
        (SimulatorRuntime, 6),
        pytest.param(ReferenceRuntime, 3, marks=pytest.mark.slow),
    ],
)
def test_bounds_follow_their_recursion(runtime, rounds):
    data = quadratic_data(3, noise=0.0)
    job = bent_job(CLIPPED, data)
    state = execute(runtime(job), rounds, measure_every=rounds).state.server
    w, of_steps, of_replies = clipped_fedbio(only_rows(data), rounds)
    for block, expected in zip(vars(state.server.point).values(), w, strict=True):
        np.testing.assert_allclose(block, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.server.shared[-1], of_steps, rtol=1e-10)
    np.testing.assert_allclose(state.bounds["local"], of_replies, rtol=1e-10)


def runs_each_phase_once(case) -> bool:
    # One that compresses its replies by itself is refused.
    compresses = bool(case.algorithm.channel().coders)
    every = case.algorithm.phases()
    return not compresses and all(isinstance(one, Phase) for one in every)


@pytest.mark.exhaustive
@of_structures(runs_each_phase_once)
def test_a_first_round_only_measures(case):
    """There it is the method itself, of any structure; bounds are known after it."""
    algorithm, data = quantile_clipped(case.algorithm, 0.5), data_for(case, 3)

    def end(method, rounds):
        job = quadratic_job(method, data, participants=cohort_of(case, 2))
        return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state

    clipped = end(algorithm, 1)
    ends = (
        algorithm.point(clipped.joined()),
        case.algorithm.point(end(case.algorithm, 1).joined()),
    )
    for left, right in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-13)
    known = [float(jnp.max(one)) for one in clipped.server.bounds.values()]
    assert min(known) > 0


def test_terms_of_a_series_are_never_cut():
    """A cut series is no inverse; what a server steps along is cut."""

    def cut(name):
        algorithm = quantile_clipped(case_of(name).algorithm, 0.5)
        return sorted(algorithm.init_server(jnp.zeros(DX), jnp.zeros(DY)).bounds)

    assert cut("fednest") == ["inner_correct", "outer_correct"]
    assert (cut("fedmbo"), cut("simfbo")) == (["lower"], ["local"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fednest", "fedmbo", "fedbioacc-local", "scaffold"])
def test_methods_of_all_kinds_go_on_with_it(name):
    case = case_of(name)
    algorithm, data = quantile_clipped(case.algorithm, 0.5), data_for(case, 3)
    job = quadratic_job(algorithm, data, participants=cohort_of(case, 2))
    state = execute(SimulatorRuntime(job), 3, measure_every=3).state
    for leaf in jax.tree.leaves(algorithm.point(state.joined())):
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_a_stop_changes_nothing_and_all_of_it_is_counted(tmp_path):
    """With STORM's memory, and a cohort."""
    method = case_of("fedbioacc").algorithm
    clipped = quantile_clipped(method, 0.5)
    job = quadratic_job(clipped, quadratic_data(4), participants=2)
    whole = execute(SimulatorRuntime(job), 5, measure_every=5).state
    kept = Checkpoints(tmp_path / "run", every_rounds=1)
    execute(SimulatorRuntime(job), 2, measure_every=5, checkpoints=kept)
    resumed = execute(SimulatorRuntime(job), 5, measure_every=5, checkpoints=kept)
    ends = (whole, resumed.state)
    for left, right in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(left, right)
    per, bounds = count(job, 5)["per_client_and_round"], 2 * 6
    assert per["floats_up"] == 2 * (DX + 2 * DY) + 2 * bounds
    assert per["floats_down"] == 2 * (DX + 2 * DY) + bounds


def test_one_client_cannot_pull_the_others_away():
    """Its lower gradients are far longer than all others."""
    calm = quadratic_data(3, noise=0.0)
    a = np.array(calm.lower["a"])
    a[1] += 40.0
    data = replace(calm, lower={**calm.lower, "a": jnp.asarray(a)})
    state = execute(SimulatorRuntime(bent_job(CLIPPED, data)), 6, measure_every=6)
    (_, y, _), *_ = clipped_fedbio(only_rows(data), 6)
    np.testing.assert_allclose(state.state.server.server.point.y, y, atol=1e-10)
    (_, before, _), _, (_, C, _) = clipped_fedbio(only_rows(data), 5)
    assert np.linalg.norm(y - before) <= C * (1 + 1e-12)
    _, zeta = only_rows(data)[1]
    alone = P * STEPS[1] * np.linalg.norm(lower_gradient(X0, before, zeta))
    assert alone > 4 * C


# What the bounds follow --------------------------------------------------------------


def followed_stream(norms, quantile):
    """Return the bounds after each round of clients with these norms."""

    def exchange(C, lengths):
        def told(length):
            reply, known = Pair(length[None], None), Pair(jnp.zeros(1), None)
            cut, tally = _cut(reply, known, C)
            return cut.x[0], tally

        cut, tallies = jax.vmap(told)(lengths)
        mean = jax.tree.map(lambda one: one.mean(0), tallies)
        after = _followed(C, mean, jnp.asarray(quantile))
        return after, (C[0], cut)

    _, (bounds, cut) = jax.lax.scan(exchange, jnp.zeros(1), norms)
    return bounds, cut


STREAMS = jax.jit(jax.vmap(followed_stream, in_axes=(0, None)))


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_bounds_find_the_quantile_of_a_stream(quantile):
    seeds, rounds, clients = 16, 1200, 5
    drawn = np.random.default_rng(0).lognormal(size=(seeds, rounds, clients))
    bounds, cut = map(np.asarray, STREAMS(jnp.asarray(drawn), quantile))
    half = rounds // 2
    assert (cut[:, 1:] <= (1 + 1e-12) * bounds[:, 1:, None]).all()
    uncut = np.mean(drawn[:, half:] <= bounds[:, half:, None])
    np.testing.assert_allclose(uncut, quantile, atol=0.01)
    true = np.log(np.quantile(drawn, quantile))
    found = np.log(bounds[:, half:]).mean(axis=1)
    # Of 16 means over 600 rounds that are far from independent.
    np.testing.assert_allclose(found.mean(), true, atol=0.08)
    assert np.abs(found - true).max() < 0.25


@given(st.floats(-3, 3), st.integers(0, 2**16))
def test_bounds_scale_with_the_changes(exponent, seed):
    drawn = np.random.default_rng(seed).lognormal(size=(1, 30, 5))
    factor = 10.0**exponent
    few, many = (STREAMS(jnp.asarray(a), 0.5)[0] for a in (drawn, factor * drawn))
    np.testing.assert_allclose(many[0, 1:], factor * few[0, 1:], rtol=1e-9)


def test_changes_of_zero_tell_nothing():
    norms = np.array([[[0.0, 0.0]], [[0.0, 3.0]], [[0.0, 0.0]], [[1.0, 1.0]]])
    norms = jnp.asarray(norms.reshape(1, 4, 2))
    bounds = np.asarray(STREAMS(norms, 0.5)[0])[0]
    np.testing.assert_allclose(bounds, [0, 0, 3, 3], atol=1e-12)


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_norms_at_the_ends_of_the_numbers(size):
    """Their squares are none."""
    reply, known = Pair(jnp.full(4, size), None), Pair(jnp.zeros(4), None)
    cut, tally = _cut(reply, known, jnp.zeros(1))
    told = [tally.values[0], tally.counted[0]]
    np.testing.assert_allclose(told, [np.log(2 * size), 1])
    cut, tally = _cut(reply, known, jnp.full(1, size))
    np.testing.assert_allclose(cut.x, size / 2)
    assert tally.values[0] == 0


# With what it goes together, and with what it does not -------------------------------


@pytest.mark.slow
def test_it_goes_with_other_means_a_safeguard_and_packets():
    data = quadratic_data(4)

    def end(algorithm, channel=None) -> Any:
        more = {} if channel is None else {"channel": channel}
        job = quadratic_job(algorithm, data, **more)
        return job, execute(SimulatorRuntime(job), 4, measure_every=4).state.server

    job, plain = end(CLIPPED)
    sites = Loopback({10 + k: site_of(job, k) for k in range(4)})
    deployed = execute(server_of(job, sites), 4).state
    _, guarded = end(SteadySteps(CLIPPED))
    _, secure = end(CLIPPED, Channel(reduction=SecureMean()))
    for other in (deployed.server, guarded.server, secure):
        every = map(jax.tree.leaves, (plain, other))
        for left, right in zip(*every, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-10)
    _, middle = end(CLIPPED, Channel(reduction=Median()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(middle))


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"clip": "quantile", "noise": 1.0}, "no epsilon counts that"),
        ({"clip": "quantile", "compress": "topk:0.1"}, "Leave out one of the two"),
        ({"clip": "quantile:1"}, "write it like quantile:0.9"),
        ({"clip": "quantile:"}, "write it like quantile:0.9"),
        ({"clip": "median"}, "neither a number"),
        ({"clip": [1.0]}, "neither a number"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused(chosen, told):
    with pytest.raises(InvalidInputError, match=told):
        Experiment("quadratic", **chosen).check()


def test_controls_that_are_learned_from_sums_are_refused():
    method = SimFBO(*STEPS, *STEPS, local_steps=2, drift="controls")
    with pytest.raises(InvalidInputError, match="learns them from the sums"):
        quantile_clipped(method, 0.5)


def test_an_experiment_reads_it():
    def algorithm(clip) -> Any:
        plain = Experiment("quadratic", "fedbio", clip=clip, safeguard=False)
        return plain.build().algorithm

    bare, clipped = algorithm(None), algorithm("quantile:0.9")
    assert type(bare) is FedBiO
    assert clipped.parameters() == {**bare.parameters(), "clip_quantile": 0.9}
    assert Experiment("quadratic", clip="0.3") == Experiment("quadratic", clip=0.3)
    assert float(algorithm("quantile").quantile) == 0.5
    assert RATE == 0.2
