"""Measured constants against NumPy, closed forms and bounds that can be proved."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import ClientData, Problem
from fedbilevel._types import Pair
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.tasks import find
from fedbilevel.tasks.quadratic import client_rows
from fedbilevel.theory._probes import _curvatures, _Place, draw_directions, extremes
from fedbilevel.theory.estimation import estimate_inputs
from tests.cases import DX, DY, ROWWISE, quadratic_data

CLIENTS = 3
DATA = quadratic_data(CLIENTS)
POINTS = [
    (jnp.array([1.0, -2.0]), jnp.array([0.5, 1.0, -3.0])),
    (jnp.array([0.0, 1.0]), jnp.array([2.0, -1.0, 0.0])),
]
# So many that no row of the few is missed.
SAMPLES = 64


@cache
def on_quadratics():
    return estimate_inputs(ROWWISE, DATA, POINTS, key=jr.key(0), samples=SAMPLES)


def rows_of(data, level, client):
    """Return one client's real rows, each with a leading axis of one."""
    size = int(getattr(data, f"{level}_sizes")[client])
    rows = jax.tree.map(lambda leaf: np.asarray(leaf)[client], getattr(data, level))
    return [{name: leaf[i : i + 1] for name, leaf in rows.items()} for i in range(size)]


def mean_of(rows):
    return {name: np.mean([row[name][0] for row in rows], axis=0) for name in rows[0]}


def lower_hessian(coefficients):
    """Return the full Hessian of g in (x, y)."""
    A, C = coefficients["A"], coefficients["C"]
    return np.block([[np.zeros((DX, DX)), C], [C.T, A]])


def lower_slope(coefficients, x, y):
    return coefficients["A"] @ y + coefficients["C"].T @ x + coefficients["a"]


def norm(matrix):
    return np.linalg.norm(matrix, 2)


LOWER = [mean_of(rows_of(DATA, "lower", k)) for k in range(CLIENTS)]
# The Hessian of f is diag(r I, I) with r = 0.5 on every row.
UPPER_NORM = 1.0


@pytest.mark.slow
def test_curvatures_are_those_of_each_client_over_all_rows():
    found = on_quadratics()
    mu = min(np.linalg.eigvalsh(one["A"])[0] for one in LOWER)
    smooth = max(UPPER_NORM, *(norm(lower_hessian(one)) for one in LOWER))
    np.testing.assert_allclose(found["mu"].value, mu, rtol=1e-12)
    np.testing.assert_allclose(found["L1"].value, smooth, rtol=1e-12)


def test_ranges_reach_to_single_rows():
    found = on_quadratics()
    single = [
        {name: leaf[0] for name, leaf in row.items()}
        for k in range(CLIENTS)
        for row in rows_of(DATA, "lower", k)
    ]
    every = [*LOWER, *single]
    convex = [np.linalg.eigvalsh(one["A"])[0] for one in every]
    smooth = [norm(lower_hessian(one)) for one in every]
    for name, values in (("mu", convex), ("L1", smooth)):
        ends = [found[name].low, found[name].high]
        np.testing.assert_allclose(ends, [min(values), max(values)], rtol=1e-12)
    assert found["mu"].low < found["mu"].value < found["mu"].high


def test_the_hessians_of_quadratics_do_not_change():
    found = on_quadratics()
    assert found["L21"].high < 1e-8
    assert found["L22"].high < 1e-8


def test_l0_is_the_largest_slope_of_f():
    slopes = [
        np.sqrt(0.25 * np.sum(x**2) + np.sum((y - row["b"][0]) ** 2))
        for x, y in jax.tree.map(np.asarray, POINTS)
        for k in range(CLIENTS)
        for row in rows_of(DATA, "upper", k)
    ]
    np.testing.assert_allclose(on_quadratics()["L0"].value, max(slopes), rtol=1e-12)
    # The smallest may be that of a mean over rows.
    assert on_quadratics()["L0"].low <= min(slopes) * (1 + 1e-12)


@pytest.mark.slow
def test_sigma_has_the_closed_form_of_noisy_quadratics():
    noise, rows = 0.5, 2
    task = find("quadratic")(2, noise=noise)
    draw = np.random.default_rng(3)
    x, y = (3 * draw.standard_normal(size) for size in (5, 6))
    found = estimate_inputs(
        task.problem,
        task.data,
        [(x, y)],
        upper_batch=None,
        lower_batch=rows,
        key=jr.key(1),
        samples=600,
    )
    # gy moves by n + N y + M'x: N = (U + U')/sqrt 2 has variance 2 on the diagonal.
    # gx moves by M y.
    parts = [6, 0.01 * 7 * np.sum(y**2), 0.01 * 6 * np.sum(x**2)]
    parts += [0.01 * 5 * np.sum(y**2)]
    assert min(parts) > 0.1 * sum(parts)
    sigma = noise * np.sqrt(sum(parts) / rows)
    gradient = found["noise_gradient"]
    np.testing.assert_allclose([gradient.value, gradient.low], sigma, rtol=0.03)
    assert found["sigma"].value == gradient.value
    # The norm of (N, M) is at least that of a row, and at most Frobenius's.
    most = 0.1 * noise * np.sqrt((6 * 7 + 5 * 6) / rows)
    assert most / np.sqrt(6) < found["noise_hessian"].value < most
    # Perturbed batches show in the range; the values are without noise.
    np.testing.assert_allclose(found["mu"].value, 0.5, rtol=1e-12)
    assert found["mu"].low < 0.45


def _joined(rows):
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def two_sided(hessian, cross, slope):
    """Return clients with two rows each, on either side of one quadratic."""
    rows = []
    for A_off, C_off, a_off in zip(hessian, cross, slope, strict=True):
        sides = [
            client_rows(
                3 * np.eye(DY) + side * A_off,
                0.2 * np.ones((DX, DY)) + side * C_off,
                0.1 * np.ones(DY) + side * a_off,
                np.zeros(DY),
                0.5,
                0.0,
            )
            for side in (-1, 1)
        ]
        uppers, lowers = zip(*sides, strict=True)
        rows.append(tuple(_joined(level) for level in (uppers, lowers)))
    return ClientData.from_clients([u for u, _ in rows], [low for _, low in rows])


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_the_noises_of_two_sided_rows_are_exact(scale):
    """Every sample is as far off as any other, so the mean square is known exactly.

    grad g is off by (E y, D y + E'x + n), the Hessian's columns in y by (E, D).
    """
    draw = np.random.default_rng(5)
    D = 0.2 * draw.standard_normal((2, DY, DY))
    D = D + np.swapaxes(D, 1, 2)
    E = 0.3 * draw.standard_normal((2, DX, DY))
    n = scale * draw.standard_normal((2, DY))
    points = [(x / 4, y / 4) for x, y in POINTS]
    found = estimate_inputs(
        ROWWISE, two_sided(D, E, n), points, key=jr.key(0), samples=4
    )
    gradient = [
        np.hypot(np.linalg.norm(e @ y), np.linalg.norm(d @ y + e.T @ x + a))
        for x, y in jax.tree.map(np.asarray, points)
        for d, e, a in zip(D, E, n, strict=True)
    ]
    hessian = [norm(np.vstack([e, d])) for d, e in zip(D, E, strict=True)]
    for name, values in (("gradient", gradient), ("hessian", hessian)):
        one = found[f"noise_{name}"]
        np.testing.assert_allclose(one.value, max(values), rtol=1e-9)
        np.testing.assert_allclose(one.low, min(values), rtol=1e-9)
    np.testing.assert_allclose(
        found["sigma"].value, max(*gradient, *hessian), rtol=1e-9
    )


def test_sigma_is_the_noise_of_the_hessian_where_that_is_larger():
    D = np.stack([np.diag([0.5, -0.25, 0.0])] * 2)
    E, n = np.zeros((2, DX, DY)), np.zeros((2, DY))
    still = [(jnp.zeros(DX), jnp.zeros(DY))] * 2
    found = estimate_inputs(
        ROWWISE, two_sided(D, E, n), still, key=jr.key(0), samples=4
    )
    assert found["noise_gradient"].value == 0
    np.testing.assert_allclose(found["sigma"].value, 0.5, rtol=1e-9)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 5.0]])
def test_heterogeneity_is_the_distance_from_the_weighted_mean(weights):
    data = eqx.tree_at(lambda one: one.weights, DATA, jnp.asarray(weights))
    found = estimate_inputs(ROWWISE, data, POINTS, key=jr.key(0), samples=SAMPLES)
    share = np.asarray(weights) / np.sum(weights)
    distances = []
    for x, y in jax.tree.map(np.asarray, POINTS):
        slopes = np.stack([lower_slope(one, x, y) for one in LOWER])
        off = np.sum((slopes - share @ slopes) ** 2, axis=1)
        distances.append(np.sqrt(share @ off))
    A = np.stack([one["A"] for one in LOWER])
    spread = [norm(one - np.tensordot(share, A, 1)) for one in A]
    gradient, hessian = (
        found[f"heterogeneity_{name}"] for name in ("gradient", "hessian")
    )
    np.testing.assert_allclose(gradient.value, max(distances), rtol=1e-12)
    np.testing.assert_allclose(gradient.low, min(distances), rtol=1e-12)
    np.testing.assert_allclose(hessian.value, max(spread), rtol=1e-9)
    np.testing.assert_allclose(hessian.low, min(spread), rtol=1e-9)


def test_clients_that_are_alike_have_no_heterogeneity():
    alike = jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * CLIENTS), DATA)
    found = estimate_inputs(ROWWISE, alike, POINTS, key=jr.key(0), samples=SAMPLES)
    assert found["heterogeneity_gradient"].high < 1e-12
    assert found["heterogeneity_hessian"].high < 1e-12


def curved_upper(x, y, rows):
    del rows
    return 0.1 * jnp.sum(x) - 5 * jnp.sum(y**2)


def curved_lower(x, y, rows):
    """Return a loss that curves by w and c, bends at y0 = 0 by j, and has a kink there.

    H = 4 I + diag(w y) + (c x0 + 0.5 j [y0 > 0]) e0 e0'; the cross Hessian is
    c y0 + 0.3 j [y0 > 0] in its first entry and 0 elsewhere.
    """
    w, c, j, h = (jnp.mean(rows[name], axis=0) for name in "wcjh")
    above = jnp.maximum(y[0], 0)
    smooth = 2 * jnp.sum(y**2) + jnp.sum(w * y**3) / 6 + c * x[0] * y[0] ** 2 / 2
    bend = j * (0.25 * above**2 + 0.3 * x[0] * above)
    return smooth + bend + h * jnp.sqrt(y[0] ** 2)


def tree_upper(x, y, rows):
    return curved_upper(x["p"][0], jnp.append(y["a"], y["b"]), rows)


def tree_lower(x, y, rows):
    return curved_lower(x["p"][0], jnp.append(y["a"], y["b"]), rows)


CURVED, TREE = Problem(curved_upper, curved_lower), Problem(tree_upper, tree_lower)


def curved_data(w, c, j):
    rows = [
        {"w": np.array([one]), "c": np.array([c]), "j": np.array([j]), "h": np.zeros(1)}
        for one in w
    ]
    return ClientData.from_clients(rows, rows)


SLOPES, CROSS = [[1.0, 2.0], [3.0, 1.0]], 0.7
SMOOTH, BENT = curved_data(SLOPES, CROSS, 0.0), curved_data(np.zeros((2, 2)), 0.0, 1.0)
X, Y = jnp.array([0.5, -0.5]), jnp.array([0.2, -0.4])


@cache
def on_smooth():
    return estimate_inputs(CURVED, SMOOTH, [(X, Y)], key=jr.key(2), samples=2)


@pytest.mark.slow
def test_hessians_that_change_are_followed_in_their_steepest_direction():
    """Along a unit (dx, dy) H changes by max(|w0 dy0 + c dx0|, |w1 dy1|).

    That is at most max(hypot(w0, c), |w1|), and reaches it; so nothing found may exceed
    it. The cross Hessian changes by c dy0.
    """
    found = on_smooth()
    exact = [max(np.hypot(w0, CROSS), w1) for w0, w1 in SLOPES]
    np.testing.assert_allclose(found["L22"].value, max(exact), rtol=1e-12)
    np.testing.assert_allclose(found["L22"].low, min(exact), rtol=1e-12)
    np.testing.assert_allclose(found["L21"].value, CROSS, rtol=1e-12)


@pytest.mark.slow
def test_l1_knows_the_upper_loss_and_curvature_below_zero():
    np.testing.assert_allclose(on_smooth()["L1"].value, 10, rtol=1e-12)


@pytest.mark.slow
def test_neither_shapes_of_x_and_y_nor_single_precision_make_a_difference():
    point = ({"p": X[None]}, {"a": Y[:1], "b": Y[1]})
    data, point = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf,
        (SMOOTH, point),
    )
    # Each client has one row, so all rows are one sample.
    found = estimate_inputs(
        TREE, data, [point], upper_batch=None, lower_batch=None, key=jr.key(2)
    )
    for name, flat in on_smooth().items():
        for part in ("value", "low", "high"):
            np.testing.assert_allclose(
                getattr(found[name], part), getattr(flat, part), rtol=1e-5, atol=1e-6
            )
    assert "batch(es) of all rows" in found["noise_gradient"].how


def on_bent(*firsts):
    points = [(X, jnp.array([first, 1.0])) for first in firsts]
    return estimate_inputs(CURVED, BENT, points, key=jr.key(2), samples=2)


def test_a_hessian_that_jumps_shows_between_points():
    """No derivative sees the jumps by 0.5 and 0.3; the distance is 2."""
    found = on_bent(-1.0, 1.0)
    np.testing.assert_allclose(found["L22"].value, 0.25, rtol=1e-12)
    np.testing.assert_allclose(found["L21"].value, 0.15, rtol=1e-12)
    assert found["L22"].low == found["L21"].low == 0
    # A run that stands still is no reason to divide by zero.
    assert on_bent(-1.0, -1.0)["L22"].value == 0


def test_an_estimate_that_is_not_finite_is_refused():
    with pytest.raises(InvalidInputError, match="estimate of mu is nan.*give other"):
        on_bent(0.0)


def test_input_that_cannot_be_used_is_named():
    x, y = POINTS[0]

    def refuse(match, points, **options):
        with pytest.raises(InvalidInputError, match=match):
            estimate_inputs(ROWWISE, DATA, points, key=jr.key(0), **options)

    refuse("`points` is empty: give", [])
    refuse("point 1 is .*must agree", [(x, y), (x, y[:2])])
    refuse("point 1 holds NaN.*before", [(x, y), (x, y * jnp.nan)])
    refuse("point 0 must be .* floating-point", [(x, jnp.arange(DY))])
    refuse("`samples` must be at least 1, got 0", POINTS, samples=0)
    refuse("`lower_batch` must be at least 1, got 0", POINTS, lower_batch=0)


@pytest.mark.parametrize(
    "spectrum",
    [np.zeros(6), np.full(6, -2.0), np.array([0, 0, 0, 1.0, 1.0, 3]), np.arange(6.0)],
    ids=["zero", "multiple-of-identity", "repeated", "distinct"],
)
def test_as_many_steps_as_dimensions_are_exact(spectrum):
    draw = np.random.default_rng(0)
    basis, _ = np.linalg.qr(draw.standard_normal((6, 6)))
    matrix = jnp.asarray(basis @ np.diag(spectrum) @ basis.T)
    ends = extremes(lambda v: matrix @ v, jnp.asarray(draw.standard_normal((6, 6))))
    wanted = [spectrum.min(), spectrum.max()]
    np.testing.assert_allclose([ends.low, ends.high], wanted, rtol=1e-13, atol=1e-13)


def test_fewer_steps_end_inside_the_spectrum_and_know_how_far_off():
    draw = np.random.default_rng(1)
    matrix = draw.standard_normal((200, 200))
    matrix = matrix @ matrix.T
    directions = jnp.asarray(draw.standard_normal((10, 200)))
    ends = extremes(lambda v: jnp.asarray(matrix) @ v, directions)
    spectrum = np.linalg.eigvalsh(matrix)
    for end, residual in (
        (ends.low, ends.low_residual),
        (ends.high, ends.high_residual),
    ):
        assert spectrum[0] < end < spectrum[-1]
        assert 1e-12 < np.min(np.abs(spectrum - end)) <= residual
    np.testing.assert_allclose(ends.high, spectrum[-1], rtol=0.05)
    assert ends.norm()[0] == ends.high
    assert ends.norm()[1] == ends.high_residual


def test_the_residual_of_mu_is_that_of_the_lower_block():
    """The block has three eigenvalues, which a few steps find; all of g has sixty."""
    stiff = jnp.linspace(1.0, 60.0, 60)

    def lower(x, y, row):
        lowest = 0.5 * y[0] ** 2 + 1.5 * y[1] ** 2
        return 0.5 * jnp.sum(stiff * x**2) + lowest + 0 * jnp.mean(row["a"])

    rows = [{"a": np.ones(2)}]
    data = ClientData.from_clients(rows, rows)
    point = Pair(jnp.ones(60), jnp.ones(2))
    place = _Place.of(point, draw_directions(point, jr.key(0)))
    oracle = Oracle(Problem(lower, lower), data, jnp.asarray(0))
    found = _curvatures(oracle, place, oracle.all_upper(), oracle.all_lower())
    assert found["mu"] == pytest.approx(1.0, abs=1e-8)
    assert found["mu residual"] < 1e-6 < found["L1 residual"]
