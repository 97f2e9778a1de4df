"""Methods of one machine repeat their listings, sample by sample, on K clients."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import algorithms
from fedbilevel._types import Pair
from fedbilevel.algorithms.one_machine.amigo import AmIGO
from fedbilevel.algorithms.one_machine.asbio_bred import ASBiOBreD
from fedbilevel.algorithms.one_machine.biadam import BiAdam
from fedbilevel.algorithms.one_machine.bio_bred import BiOBreD
from fedbilevel.algorithms.one_machine.fsla import FSLA
from fedbilevel.algorithms.one_machine.ma_soba import MASOBA
from fedbilevel.algorithms.one_machine.s_tfbo import STFBO
from fedbilevel.algorithms.one_machine.saba import SABA
from fedbilevel.algorithms.one_machine.sbio_bred import SBiOBreD
from fedbilevel.algorithms.one_machine.soba import SOBA
from fedbilevel.algorithms.one_machine.spaba import SPABA
from fedbilevel.algorithms.one_machine.srba import SRBA
from fedbilevel.algorithms.one_machine.stocbio import StocBiO
from fedbilevel.algorithms.one_machine.vrbo import VRBO
from fedbilevel.algorithms.presets import ALSET, BSA, RSVRB, FedBiOAccLocal, VRBiAdam
from fedbilevel.hypergradient import Neumann, RandomNeumann, Unrolled
from fedbilevel.runtime import SimulatorRuntime, execute, keys
from fedbilevel.schedules import CubeRootDecay, PowerDecay
from tests.cases import quadratic_data
from tests.reference import bent_oracles, single_listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.replay_phases import (
    bundle_and_zeta_of,
    bundle_of,
    draw_phase,
    one_of_each,
    phase_number,
    zeta,
)

ROUNDS, P, CLIENTS = 4, 3, 3
LR = (0.1, 0.2, 0.15)
DECAY = CubeRootDecay(2.0, 8.0)


def decay(t):
    """Return the schedule `DECAY` at t."""
    return 2.0 / (8.0 + t) ** (1 / 3)


SHORT = CubeRootDecay(0.6, 8.0)
POWER = PowerDecay(1.5, 2.0, 0.6)


def power(t):
    """Return the schedule `POWER` at t."""
    return 1.5 / (2.0 + t) ** 0.6


def end_of(job, rounds=ROUNDS):
    return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state.server


def assert_close(point, expected, tolerance=1e-10):
    for block, value in zip(vars(point).values(), expected, strict=True):
        np.testing.assert_allclose(block, value, rtol=0, atol=tolerance)


# Of methods that share their parts one is compared at once, and all in the long run.
RELATIVE = pytest.mark.slow


def test_soba_is_its_listing():
    job = bent_job(SOBA(*LR, DECAY, local_steps=P), quadratic_data(CLIENTS), seed=3)
    samples = draw_phase(job, "step", ROUNDS * P, one_of_each)
    expected = single_listings.soba(X0, Y0, samples, lr=LR, a=decay)
    assert_close(end_of(job).point, expected)


@RELATIVE
def test_ma_soba_is_its_listing():
    algorithm = MASOBA(*LR, 0.3, DECAY, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=4)
    samples = draw_phase(job, "step", ROUNDS * P, one_of_each)
    numbers = {"lr": LR, "a": decay, "alpha": 0.3}
    *point, u = single_listings.ma_soba(X0, Y0, samples, **numbers)
    server = end_of(job)
    assert_close(server.point, point)
    assert_close(Pair(server.direction.x, 0.0), (u, 0.0))


def rounds_of(job, draw, large_batch, lengths, most):
    """Return the large and the small samples of every round, by client."""
    larges = draw_phase(job, "large", len(lengths) * large_batch, draw)
    smalls = draw_phase(job, "step", len(lengths) * most, draw)
    return [
        (
            [client[r * large_batch : (r + 1) * large_batch] for client in larges],
            [client[r * most : r * most + length] for client in smalls],
        )
        for r, length in enumerate(lengths)
    ]


def soba_directions(w, sample):
    return single_listings.three(*w, *sample)


@RELATIVE
def test_srba_is_its_listing():
    algorithm = SRBA(*LR, period=4, large_batch=2)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=5)
    rounds = rounds_of(job, one_of_each, 2, [3] * ROUNDS, 3)
    start = [X0, Y0, np.zeros_like(Y0)]
    expected = single_listings.recursive(start, rounds, soba_directions, lr=LR)
    assert_close(end_of(job).point, expected)


def test_spaba_is_its_listing():
    longest, rounds = 8, 6
    algorithm = SPABA(*LR, 0.4, large_batch=2, longest=longest)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=6)
    where = (keys.ROUNDS, phase_number(job, "step"))
    lengths = [
        int(keys.draw_streak(job.key, *where, r, longest, 0.4)) for r in range(rounds)
    ]
    assert len(set(lengths)) > 2
    drawn = rounds_of(job, one_of_each, 2, lengths, longest)
    start = [X0, Y0, np.zeros_like(Y0)]
    expected = single_listings.recursive(start, drawn, soba_directions, lr=LR)
    assert_close(end_of(job, rounds).point, expected)


def test_a_streak_is_the_coins_that_show_tails_first():
    root = jr.key(3)

    def drawn(chance, most):
        many = jax.vmap(lambda r: keys.draw_streak(root, 0, 1, r, most, chance))
        return np.asarray(many(np.arange(4000)))

    found = drawn(0.25, 200)
    # Geometric on {0, 1, ..}: mean (1 - pr) / pr = 3, chance of 0 is pr.
    assert abs(found.mean() - 3) < 4 * np.sqrt(12 / 4000)
    assert abs((found == 0).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 4000)
    assert (drawn(1.0, 5) == 0).all()
    np.testing.assert_array_equal(drawn(0.25, 4), np.minimum(drawn(0.25, 4), 4))
    assert drawn(0.25, 4).max() == 4


@RELATIVE
def test_stocbio_is_its_listing():
    theta, T_in = 0.25, 2
    rule = Neumann(2, theta)
    algorithm = StocBiO(rule, 0.1, 0.2, POWER, DECAY, inner_steps=T_in, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=8)
    expected = alternated(
        job, lambda x, y, b: bent_oracles.hypergradient(x, y, b, theta), T_in
    )
    assert_close(end_of(job).point, expected)


@pytest.mark.parametrize("upper_first", [pytest.param(False, marks=RELATIVE), True])
def test_the_random_series_is_the_listing_of_bsa_ttsa_and_alset(upper_first):
    theta, N, T_in = 0.25, 3, 2
    make = BSA if upper_first else ALSET
    sizes = {"a": POWER, "b": DECAY, "inner_steps": T_in, "local_steps": P}
    algorithm = make(
        hypergradient=RandomNeumann(N, theta),
        lr_x=0.1,
        lr_y=0.2,
        **sizes,
    )
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=9)
    expected = alternated(
        job,
        lambda x, y, b: single_listings.random_term(x, y, b, theta, N),
        T_in,
        upper_first=upper_first,
    )
    assert_close(end_of(job).point, expected)


def alternated(job, h, T_in, **more):
    lowers = draw_phase(job, "lower", ROUNDS * P * T_in, zeta)
    uppers = draw_phase(job, "upper", ROUNDS * P, bundle_of(job))
    numbers: dict[str, Any] = {"lr": (0.1, 0.2), "T_in": T_in, "a": power, "b": decay}
    return single_listings.alternating(X0, Y0, lowers, uppers, h, **numbers, **more)


def of_three_phases(job, *counts):
    """Return what clients draw below, for the system, and above."""
    draws = zip(("lower", "system", "upper"), counts, strict=True)
    return [
        draw_phase(job, name, count, zeta if name == "lower" else one_of_each)
        for name, count in draws
    ]


@RELATIVE
def test_amigo_is_its_listing():
    T_in, N_z = 2, 3
    algorithm = AmIGO(*LR, inner_steps=T_in, system_steps=N_z, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=10)
    total = ROUNDS * P
    drawn = of_three_phases(job, total * T_in, total * N_z, total)
    expected = single_listings.amigo(X0, Y0, *drawn, lr=LR, T_in=T_in, N_z=N_z)
    assert_close(end_of(job).point, expected)


def test_fsla_is_its_listing():
    algorithm = FSLA(*LR, 0.4, DECAY, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=11)
    drawn = of_three_phases(job, *[ROUNDS * P] * 3)
    numbers = {"lr": LR, "a": decay, "alpha": 0.4}
    *point, u = single_listings.fsla(X0, Y0, *drawn, **numbers)
    server = end_of(job)
    assert_close(server.point, point)
    assert_close(Pair(server.direction.x, 0.0), (u, 0.0))


def test_s_tfbo_is_its_listing():
    job = bent_job(STFBO(0.7, local_steps=P), quadratic_data(CLIENTS), seed=12)
    samples = draw_phase(job, "step", ROUNDS * P, one_of_each)
    expected = single_listings.s_tfbo(X0, Y0, samples, start=0.7)
    assert_close(end_of(job).point, expected)


SERIES = {
    "whole": (
        Neumann(2, 0.25),
        lambda x, y, b: bent_oracles.hypergradient(x, y, b, 0.25),
    ),
    "random": (
        RandomNeumann(3, 0.25),
        lambda x, y, b: single_listings.random_term(x, y, b, 0.25, 3),
    ),
}
MOMENTUM: dict[str, dict[str, Any]] = {
    "smb": {"alpha": 1.5, "beta": 2.0, "rho1": 0.4, "rho2": 0.7, "eta": SHORT},
    "mrbo": {"c1": 1.5, "c2": 2.0, "gamma": 0.4, "lam": 0.7, "eta": SHORT},
    "sustain": {"c_f": 1.5, "c_g": 2.0, "c_a": 0.4, "c_b": 0.7, "a": SHORT},
}


@pytest.mark.parametrize(
    ("name", "series", "power"),
    [
        ("mrbo", "whole", 2),
        pytest.param("sustain", "random", 2, marks=RELATIVE),
        pytest.param("smb", "whole", 1, marks=RELATIVE),
    ],
)
def test_momentum_of_one_machine_follows_its_listing(name, series, power):
    """MRBO and SUSTAIN share a form, and differ in the series; SMB only averages."""
    rule, h = SERIES[series]
    make = algorithms.find(name).make
    algorithm = make(hypergradient=rule, local_steps=P, **MOMENTUM[name])
    job = bent_job(algorithm, quadratic_data(1), seed=13)
    (samples,) = draw_phase(job, "local", ROUNDS * P, bundle_and_zeta_of(job))
    *point, u, v = single_listings.momentum(
        X0,
        Y0,
        samples,
        h,
        lr=(0.4, 0.7),
        eta=lambda t: 0.6 / (8.0 + t) ** (1 / 3),
        weights=(1.5, 2.0),
        power=power,
        corrected=power == 2,
    )
    server = end_of(job)
    assert_close(server.point, point)
    assert_close(server.direction, (u, v))


def test_rsvrb_is_its_listing():
    """It is FedBiOAcc-Local, which is compared with a listing of its own."""
    letters = (SERIES["whole"][0], SHORT, 1.5, 2.0, 0.4, 0.7)
    names = ("hypergradient", "eta", "alpha", "beta", "rho1", "rho2")
    blocks = RSVRB(**dict(zip(names, letters, strict=True)), local_steps=P)
    others = ("hypergradient", "a", "c_nu", "c_omega", "eta", "gamma")
    given = dict(zip(others, letters, strict=True))
    chain = FedBiOAccLocal(**given, local_steps=P)
    assert eqx.tree_equal(blocks, replace(chain, named=blocks.named))


def pairs_of(job, large_batch, lengths, most):
    return rounds_of(job, bundle_and_zeta_of(job), large_batch, lengths, most)


def test_vrbo_is_its_listing():
    (rule, h), q, m = SERIES["whole"], 2, 3
    algorithm = VRBO(rule, 0.1, 0.2, inner_steps=m, period=q, large_batch=2)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=14)
    rounds = pairs_of(job, 2, [q * m] * ROUNDS, q * m)
    expected = single_listings.vrbo(X0, Y0, rounds, h, lr=(0.1, 0.2), q=q, m=m)
    assert_close(end_of(job).point, expected)


@pytest.mark.parametrize(
    ("form", "corrected"),
    [("code", True), pytest.param("paper", False, marks=RELATIVE)],
)
def test_biadam_is_its_listing(form, corrected):
    rule, h = SERIES["whole"]
    make: Any = VRBiAdam if corrected else BiAdam
    numbers: dict[str, Any] = {"tau": 0.9, "small": 1e-3, "start": 0.2}
    steps: dict[str, Any] = {"lr_x": 0.05, "lr_y": 0.1, "alpha": 0.3, "beta": 0.4}
    choices: dict[str, Any] = {"a": DECAY, "form": form, "local_steps": P}
    algorithm = make(hypergradient=rule, **steps, **choices, **numbers)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=15)
    samples = draw_phase(job, "step", ROUNDS * P, bundle_and_zeta_of(job))
    expected = single_listings.biadam(
        X0,
        Y0,
        samples,
        h,
        lr=(0.05, 0.1),
        a=decay,
        weights=(0.3, 0.4),
        paper=form == "paper",
        corrected=corrected,
        **numbers,
    )
    assert_close(end_of(job).point, expected)


def unrolled_draw(oracle, key):
    return Unrolled(2, 0.2).draw(oracle, key)


def test_bio_bred_is_its_listing():
    algorithm = BiOBreD(0.02, 0.2, 0.3, 2, psi="diagonal", local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=16)

    def split(drawn):
        xi, zetas = drawn
        return xi, [{n: leaf[i] for n, leaf in zetas.items()} for i in range(2)]

    drawn = draw_phase(job, "step", ROUNDS * P, unrolled_draw)
    samples = [[split(one) for one in client] for client in drawn]
    numbers: dict[str, Any] = {"lr": (0.02, 0.2), "l1": 0.3, "diagonal": True}
    expected = single_listings.bio_bred(X0, Y0, samples, **numbers)
    assert_close(end_of(job).point, expected)


def test_sbio_bred_is_its_listing():
    rule, h = SERIES["random"]
    algorithm = SBiOBreD(rule, 0.3, 0.2, DECAY, 0.9, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=17)
    samples = draw_phase(job, "step", ROUNDS * P, bundle_and_zeta_of(job))
    rounds = [
        ([[client[t]] for client in samples], [[] for _ in samples])
        for t in range(ROUNDS * P)
    ]
    numbers: dict[str, Any] = {"lr": (0.3, 0.2), "b": decay, "l1": 0.9}
    x, y = single_listings.mirrored(X0, Y0, rounds, h, diagonal=False, **numbers)
    assert_close(end_of(job).point, (x, y))
    assert (x == 0).any()  # the threshold is at work


@RELATIVE
def test_asbio_bred_is_its_listing():
    rule, h = SERIES["random"]
    algorithm = ASBiOBreD(rule, 0.02, 0.2, 0.3, 3, 2, psi="diagonal")
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=18)
    rounds = pairs_of(job, 2, [2] * ROUNDS, 2)
    numbers: dict[str, Any] = {"lr": (0.02, 0.2), "b": lambda t: 1.0, "l1": 0.3}
    expected = single_listings.mirrored(X0, Y0, rounds, h, diagonal=True, **numbers)
    assert_close(end_of(job).point, expected)


def parts_of(data, level, parts):
    """Return (weight, rows) of every part, [client][part], each row a batch of one."""
    rows = {name: np.asarray(leaf) for name, leaf in getattr(data, level).items()}
    sizes = np.asarray(getattr(data, f"{level}_sizes"))

    def one(k, r):
        return {name: leaf[k, r : r + 1] for name, leaf in rows.items()}

    return [
        [
            (parts / size, [one(k, r) for r in range(i, size, parts)])
            for i in range(parts)
        ]
        for k, size in enumerate(sizes)
    ]


def test_saba_is_its_listing():
    parts, data = 2, quadratic_data(CLIENTS)
    job = bent_job(SABA(*LR, parts=parts, local_steps=P), data, seed=7)

    def which(client, t):
        turn = keys.client_turn(job.key, (keys.ROUNDS, 0), client, t)
        return tuple(
            int(jr.randint(key, (), 0, parts, "int32"))
            for key in jr.split(turn.keys(1)[0])
        )

    drawn = [[which(k, t) for t in range(ROUNDS * P)] for k in range(CLIENTS)]
    tables: Any = (parts_of(data, "lower", parts), parts_of(data, "upper", parts))
    expected = single_listings.saba(X0, Y0, drawn, *tables, lr=LR)
    assert_close(end_of(job).point, expected)


@pytest.mark.parametrize("parts", [1, 2, 5, 9])
def test_the_mean_over_parts_is_that_over_all_rows(parts):
    apart = quadratic_data(2)
    job = bent_job(SABA(*LR), apart)
    for data in (apart, apart.pooled()):
        oracle = bent_job(SABA(*LR), data).oracle(0)
        _, count = oracle.parts(parts)
        assert count == min(parts, 3 if data is apart else 4)
        slopes = [
            oracle.lower_gradient(job.x, job.y, oracle.part_lower(i, parts))
            for i in range(int(count))
        ]
        whole = oracle.lower_gradient(job.x, job.y, oracle.all_lower())
        np.testing.assert_allclose(np.mean(slopes, axis=0), whole, rtol=0, atol=1e-12)
