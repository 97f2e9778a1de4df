"""Methods without a Hessian repeat their listings, sample by sample, on K clients."""

from typing import Any

import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms.parts import Iterate
from fedbilevel.algorithms.penalty._copies import Copies
from fedbilevel.algorithms.penalty.f2sa_p import F2SAP
from fedbilevel.algorithms.penalty.f3sa import F3SA
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.algorithms.penalty.pbgd_free import PBGDFree
from fedbilevel.algorithms.penalty.v_pbgd import VPBGD
from fedbilevel.algorithms.presets import F2BA, F2SA, FedF2SA2, FedF2SAControls
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference import penalty_listings as listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.drift_listings import Walk
from tests.reference.replay_phases import draw_phase, one_of_each, xi, zeta

ROUNDS, P, CLIENTS = 4, 3, 3
LR, NU = (0.1, 0.2), 0.05
SLOW = pytest.mark.slow


def decay(t):
    return 2.0 / (8.0 + t) ** (1 / 3)


DECAY = CubeRootDecay(2.0, 8.0)


def bundle(oracle, key):
    """Draw xi and, independent of it and of each other, two zetas."""
    for_xi, for_y, for_x = jr.split(key, 3)
    return xi(oracle, for_xi), zeta(oracle, for_y), zeta(oracle, for_x)


def job_of(algorithm, seed):
    return bent_job(algorithm, quadratic_data(CLIENTS), seed=seed)


def end_of(job, rounds=ROUNDS):
    return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def assert_copies(w, x, copies):
    assert_close(w.x, x)
    # In the order in which the scheme has them, which is that of the listing.
    for block, value in zip(
        (w.y, w.z, w.third, w.fourth), copies.values(), strict=False
    ):
        assert_close(block, value)
    assert len(copies) == 2 + 2 * (w.fourth is not None)


@pytest.mark.parametrize(
    ("degree", "alternating"),
    [
        (1, True),
        (2, False),
        pytest.param(3, True, marks=SLOW),
        pytest.param(4, False, marks=SLOW),
    ],
)
def test_fed_f2sa_is_its_listing(degree, alternating):
    chosen: dict[str, Any] = {"degree": degree, "alternating": alternating}
    job = job_of(FedF2SA(*LR, NU, local_steps=P, **chosen), 3)
    samples = draw_phase(job, "local", ROUNDS * P, bundle)
    x, copies = listings.fed_f2sa(X0, Y0, samples, p=P, lr=LR, nu=NU, **chosen)
    assert_copies(end_of(job).server.point, x, copies)


def test_fed_f2sa_2_is_its_listing():
    algorithm = FedF2SA2(*LR, NU, local_steps=P)
    job = job_of(algorithm, 4)
    samples = draw_phase(job, "local", ROUNDS * P, bundle)
    x, copies = listings.fed_f2sa(X0, Y0, samples, degree=2, p=P, lr=LR, nu=NU)
    found = algorithm.point(end_of(job).server)
    assert_close(found.x, x)
    assert_close(found.y, (copies[1] + copies[-1]) / 2)


def test_what_is_reported_has_no_penalty():
    """Of degree 1 that is a copy; copies on a curve through j = 0 tell its value."""
    algorithm = FedF2SA(*LR, NU, local_steps=P)
    job = job_of(algorithm, 3)
    samples = draw_phase(job, "local", ROUNDS * P, bundle)
    _, copies = listings.fed_f2sa(X0, Y0, samples, degree=1, p=P, lr=LR, nu=NU)
    assert_close(algorithm.point(end_of(job).server).y, copies[0])
    curves = {2: (5, -2, 0, 0), 3: (5, -2, 3, -1), 4: (5, -2, 3, -1)}
    for degree, (a, b, c, d) in curves.items():
        kind = FedF2SA(*LR, NU, local_steps=1, degree=degree)
        offsets = np.asarray(list(listings.WEIGHTS[degree]), float)
        values = a + b * offsets + c * offsets**2 + d * offsets**3
        assert_close(kind.point(Iterate(Copies(0.0, *values))).y, 5)


def lines_of(degree):
    """Return the directions of x and of the copies, for the walk with corrections."""
    offsets = list(listings.WEIGHTS[degree])

    def of_x(w, sample):
        xi, _, other = sample
        return listings.h(w[0], dict(zip(offsets, w[1:], strict=True)), NU, xi, other)

    def of_copy(place, j):
        return lambda w, s: listings.slope(w[0], w[place], j, NU, s[0], s[1])

    return [of_x, *(of_copy(1 + i, j) for i, j in enumerate(offsets))]


def test_fed_f2sa_controls_is_its_listing():
    job = job_of(FedF2SAControls(*LR, NU, local_steps=P), 5)
    samples = draw_phase(job, "local", ROUNDS * P, bundle)
    # All three lines share one bundle.
    drawn = [[(one,) * 3 for one in client] for client in samples]
    walk = Walk(lines_of(2), P, lambda t: (LR[0], LR[1], LR[1]), drift="controls")
    everybody = [list(range(CLIENTS))] * ROUNDS
    w, _, c, _ = walk.run([X0, Y0, Y0], drawn, everybody, [1 / CLIENTS] * CLIENTS)
    server = end_of(job).server
    for found, expected in ((server.point, w), (server.shared[0], c)):
        for block, value in zip((found.x, found.y, found.z), expected, strict=True):
            assert_close(block, value)


LOOP: dict[str, Any] = {"inner_steps": 2, "local_steps": 2}


def f2sa_p(degree, begin="own"):
    return F2SAP(
        *LR, NU, DECAY, CubeRootDecay(2.0, 27.0), degree=degree, begin=begin, **LOOP
    )


@pytest.mark.parametrize(
    ("algorithm", "degree", "begin"),
    [
        (f2sa_p(2), 2, "own"),
        pytest.param(f2sa_p(4, "sides"), 4, "sides", marks=SLOW),
        pytest.param(f2sa_p(3, "sides"), 3, "sides", marks=SLOW),
    ],
    ids=["2", "4", "3"],
)
def test_f2sa_p_is_its_listing(algorithm, degree, begin):
    job = job_of(algorithm, 6)
    lowers = draw_phase(job, "lower", ROUNDS * 4, one_of_each)
    uppers = draw_phase(job, "upper", ROUNDS * 2, one_of_each)
    numbers: dict[str, Any] = {"lr": LR, "a": decay, "T_in": 2}
    numbers["nu"] = lambda t: NU * 2.0 / (27.0 + t) ** (1 / 3)
    found = listings.f2sa_p(
        X0, Y0, lowers, uppers, degree=degree, begin=begin, **numbers
    )
    assert_copies(end_of(job).server.point, *found)


@SLOW
@pytest.mark.parametrize(("kind", "begin"), [(F2SA, "own"), (F2BA, "one")])
def test_the_methods_of_order_one_are_their_listings(kind, begin):
    job = job_of(kind(*LR, NU, **LOOP), 7)
    lowers = draw_phase(job, "lower", ROUNDS * 4, one_of_each)
    uppers = draw_phase(job, "upper", ROUNDS * 2, one_of_each)
    numbers: dict[str, Any] = {"lr": LR, "a": lambda t: 1, "nu": lambda t: NU}
    numbers |= {"degree": 1, "T_in": 2, "begin": begin}
    found = listings.f2sa_p(X0, Y0, lowers, uppers, **numbers)
    assert_copies(end_of(job).server.point, *found)


def test_f3sa_is_its_listing():
    job = job_of(F3SA(*LR, 0.3, 0.4, NU, CubeRootDecay(2.0, 8.0), local_steps=P), 8)
    lowers = draw_phase(job, "lower", ROUNDS * P, one_of_each)
    uppers = draw_phase(job, "upper", ROUNDS * P, one_of_each)
    numbers: dict[str, Any] = {"lr": LR, "nu": NU, "a": decay}
    x, copies, u = listings.f3sa(X0, Y0, lowers, uppers, **numbers, alpha=0.3, beta=0.4)
    server = end_of(job).server
    assert_copies(server.point, x, copies)
    assert_close(server.direction.x, u)


@pytest.mark.parametrize("gam", [4.0, pytest.param(0.5, marks=SLOW)])
def test_v_pbgd_is_its_listing(gam):
    job = job_of(VPBGD(0.1, 0.2, 0.15, gam, inner_steps=2, rise=3), 9)
    lowers = draw_phase(job, "lower", 2 * ROUNDS, zeta)
    joints = draw_phase(job, "step", ROUNDS, one_of_each)
    rising = lambda t: gam * min((t + 1) / 3, 1)  # noqa: E731
    numbers: dict[str, Any] = {"T_in": 2, "lr": (0.1, 0.2, 0.15), "gam": rising}
    x, w, y = listings.v_pbgd(X0, Y0, lowers, joints, **numbers)
    assert_copies(end_of(job).server.point, x, {0: w, 1: y})


@SLOW
def test_pbgd_free_is_its_listing():
    job = job_of(PBGDFree(*LR, NU, inner_steps=2, flat="yes"), 10)
    lowers = draw_phase(job, "lower", 2 * ROUNDS, one_of_each)
    uppers = draw_phase(job, "upper", ROUNDS, xi)
    x, y = listings.pbgd_free(X0, Y0, lowers, uppers, T_in=2, lr=LR, nu=NU)
    point = end_of(job).server.point
    assert_close(point.x, x)
    assert_close(point.y, y)
