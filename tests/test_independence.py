"""Samples that must not depend on each other: no key twice, no row too often.

A mistake here leaves every listing test green, where the same draws are replayed: the
mean is still right, and only the theory's variance is not.
"""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel._types import Pair
from fedbilevel.algorithms.directions import hypergradient_and_slope, three_directions
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.channels import Channel, TopK
from fedbilevel.hypergradient import (
    DARTS,
    SAMA,
    ConjugateGradient,
    ForwardGradient,
    FrozenNeumann,
    Neumann,
    RandomNeumann,
    Unrolled,
)
from fedbilevel.problem import ClientData, Oracle, Problem
from fedbilevel.runtime import SimulatorRuntime, checkpoint, execute, keys
from fedbilevel.runtime.counts import count
from tests.cases import (
    for_cases,
    quadratic_data,
    quadratic_job,
)
from tests.reference.bent_job import bent_job
from tests.watching import Watched, cohort_job, watching

pytestmark = pytest.mark.two_devices


def keys_of(run) -> Counter:
    """Return how often each key was drawn with while `run()` was computed."""
    with watching() as seen:
        run()
        jax.effects_barrier()
        return Counter(seen.keys)


def watched(data: Any, problem: Any) -> Watched:
    return Watched(problem, data, jnp.asarray(0))


RULES = {
    "neumann": (Neumann(3, 0.1), 1 + 1 + 3),
    "random": (RandomNeumann(4, 0.1), 1 + 1 + 3),
    "frozen": (FrozenNeumann(3, 0.1), 3),
    "conjugate": (ConjugateGradient(3), 3),
    "unrolled": (Unrolled(4, 0.1), 1 + 4),
    "darts": (DARTS(0.1), 1 + 1),
    "sama": (SAMA(0.1, samples=3), 1 + 1 + 3),
    "forward": (ForwardGradient(4, 0.1), 1 + 4),
}


@pytest.mark.parametrize("name", RULES)
def test_a_bundle_has_a_key_for_each_of_its_samples(name):
    rule, samples = RULES[name]
    made = bent_job(LocalBSGM(rule, 0.1, 1, 1, 1, 1, local_steps=1), quadratic_data(1))
    oracle = watched(made.data, made.problem)
    found = keys_of(lambda: rule.draw(oracle, jr.key(0)))
    assert len(found) == samples and set(found.values()) == {1}
    # The lower gradient's sample is one more.
    both = keys_of(lambda: hypergradient_and_slope(rule, oracle, jr.key(0)))
    assert len(both) == samples + 1 and set(both.values()) == {1}


def test_three_directions_have_five_samples():
    made = bent_job(
        LocalBSGM(Neumann(1, 0.1), 0.1, 1, 1, 1, 1, local_steps=1), quadratic_data(1)
    )
    oracle = watched(made.data, made.problem)
    found = keys_of(lambda: three_directions(oracle, jr.key(0)))
    assert len(found) == 5 and set(found.values()) == {1}


@for_cases(lambda case: case.name == "local-bsgvrm")
def test_no_two_draws_of_a_simulation_share_a_key(case):
    """In a compiled program, too; of every row test_rows.py asks it."""
    made = cohort_job(case)
    rounds, simulator = 2, SimulatorRuntime(made)
    found = keys_of(lambda: execute(simulator, rounds))
    assert max(found.values()) == 1
    # A sample is one row here: that many draws there were, by clients, and by the
    # places that fill up the devices and are nobody's.
    places = simulator.layout.devices * simulator.layout.places(made.participants)
    draws = sum(count(made, rounds)["samples"].values())
    assert sum(found.values()) * made.participants == draws * places


def test_every_name_of_a_key_counts():
    """Keys of clients and shared ones, over stages, phases, clients and turns."""
    root, numbers = jr.key(0), range(4)
    names = list(product((keys.ROUNDS, keys.SETUP), numbers, numbers))
    found = [keys.client_key(root, *name) for name in names]
    found += [keys.shared_key(root, *name) for name in names]
    words = {tuple(np.asarray(jr.key_data(key)).tolist()) for key in found}
    assert len(words) == len(found)
    # Neither stage nor phase nor turn leaves a cohort, or a length, as it was.
    cohorts = {tuple(keys.draw_cohort(root, *n, 40, 40).tolist()) for n in names}
    lengths = {int(keys.draw_length(root, *n, 2**30)) for n in names}
    assert len(cohorts) == len(lengths) == len(names)


def rows_by_number(sizes, weights) -> ClientData:
    """Return clients whose rows tell whose they are, and which."""

    def rows(client, size):
        return {"who": np.full(size, client), "which": np.arange(size)}

    every = [rows(client, size) for client, size in enumerate(sizes)]
    return ClientData.from_clients(every, every, weights)


DRAWS = 40_000
LOSSLESS = Problem(lambda x, y, rows: jnp.zeros(()), lambda x, y, rows: jnp.zeros(()))


def test_pooled_draws_follow_the_weights_and_not_the_sizes():
    """A row of client k has the chance w_k / (sum w n_k), each within 5 deviations."""
    sizes, weights = (2, 5, 3), (1.0, 2.0, 5.0)
    pooled = rows_by_number(sizes, weights).pooled()
    oracle = Oracle(LOSSLESS, pooled, jnp.asarray(0), DRAWS, DRAWS)
    for draw in (oracle.draw_upper, oracle.draw_lower):
        drawn = jax.tree.map(np.asarray, draw(jr.key(3)).rows)
        for client, size in enumerate(sizes):
            chance = weights[client] / sum(weights) / size
            for which in range(size):
                found = np.sum((drawn["who"] == client) & (drawn["which"] == which))
                room = 5 * np.sqrt(DRAWS * chance * (1 - chance))
                assert abs(found - DRAWS * chance) < room


def independent(left, right, sizes) -> bool:
    """Say whether two columns of numbers pass a chi-square test, p above 1e-6."""
    table = np.zeros(sizes)
    np.add.at(table, (left, right), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    freedom = (sizes[0] - 1) * (sizes[1] - 1)
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(np.sum((table - expected) ** 2 / expected)) < limit


def test_the_chi_square_test_has_power():
    draw = np.random.default_rng(0)
    left, right = draw.integers(0, 4, (2, 4000))
    assert independent(left, right, (4, 4))
    mixed = np.where(draw.random(4000) < 0.2, left, right)
    assert not independent(left, mixed, (4, 4))


def test_rows_of_a_bundle_are_independent():
    """xi, zeta_0, zeta_1, zeta_2 and zeta over many bundles, pair by pair."""
    data, rule = rows_by_number((4,), None), Neumann(2, 0.1)
    oracle = Oracle(LOSSLESS, data, jnp.asarray(0))

    def drawn(key):
        for_bundle, for_zeta = jr.split(key)
        bundle = rule.draw(oracle, for_bundle)
        factors = bundle.factors.rows["which"]
        return jnp.concatenate(
            [
                bundle.upper.rows["which"],
                bundle.cross.rows["which"],
                factors[:, 0],
                oracle.draw_lower(for_zeta).rows["which"],
            ]
        )

    columns = np.asarray(jax.vmap(drawn)(jr.split(jr.key(1), 4000))).T
    for i, left in enumerate(columns):
        for right in columns[i + 1 :]:
            assert independent(left, right, (4, 4))


def test_whose_row_and_which_row_are_independent():
    pooled = rows_by_number((4, 4, 4), None).pooled()
    oracle = Oracle(LOSSLESS, pooled, jnp.asarray(0), 6000, 6000)
    drawn = jax.tree.map(np.asarray, oracle.draw_lower(jr.key(5)).rows)
    assert independent(drawn["who"], drawn["which"], (3, 4))


# The fingerprint of a run ---------------------------------------------------------

BASE = quadratic_job(
    LocalBSGM(Neumann(1, 0.3), 0.1, 3.0, 4.0, 0.5, 0.8, local_steps=2),
    quadratic_data(3),
)
CHANGES: dict[str, Any] = {
    "private y": lambda one: replace(one, private=Pair(False, True)),
    "private x": lambda one: replace(one, private=Pair(True, False)),
    "clients": lambda one: replace(one, clients=4),
    "participants": lambda one: replace(one, participants=2),
    "upper batch": lambda one: replace(one, upper_batch=2),
    "lower batch": lambda one: replace(one, lower_batch=None),
    "key": lambda one: replace(one, key=jr.key(1)),
    "x": lambda one: replace(one, x=one.x + 1),
    "y": lambda one: replace(one, y=one.y + 1),
    "channel": lambda one: replace(one, channel=Channel((TopK(0.5),))),
    "weights": lambda one: eqx.tree_at(
        lambda job: job.data.weights, one, one.data.weights.at[0].set(2.0)
    ),
    "a row": lambda one: eqx.tree_at(
        lambda job: job.data.lower["a"], one, one.data.lower["a"].at[0, 0, 0].add(1)
    ),
    "a size": lambda one: eqx.tree_at(
        lambda job: job.data.upper_sizes, one, one.data.upper_sizes.at[0].set(2)
    ),
    "a letter": lambda one: eqx.tree_at(lambda job: job.algorithm.rho1, one, 0.6),
    "a count": lambda one: replace(
        one, algorithm=replace(one.algorithm, local_steps=3)
    ),
    "factors": lambda one: replace(
        one, algorithm=replace(one.algorithm, hypergradient=Neumann(2, 0.3))
    ),
    "attendance": lambda one: replace(one, attendance=jnp.ones((2, 3), jnp.uint8)),
}


def test_a_fingerprint_tells_every_change_from_all_others():
    marks = {name: checkpoint.fingerprint(of(BASE), 1) for name, of in CHANGES.items()}
    marks["nothing"] = checkpoint.fingerprint(BASE, 1)
    marks["measured less often"] = checkpoint.fingerprint(BASE, 2)
    assert len(set(marks.values())) == len(marks)
    assert checkpoint.fingerprint(BASE, 1) == marks["nothing"]
