"""What the theory commands do: plans that run, exponents that were measured."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import LocalBSGM, LocalBSGVRM, tasks
from fedbilevel.cli.app import app
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.theory import calibrate, setting_of
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import configure
from fedbilevel.studies.planning import calibrate as calibrate_objects
from fedbilevel.studies.planning import floor_of, metric_curves
from fedbilevel.studies.scaling import (
    Measured,
    criterion,
    default_targets,
    fit_exponent,
    measure_complexity,
    measure_speedup,
    until,
)
from fedbilevel.studies.setting import Setting
from fedbilevel.theory.claims import algorithm_by, subject_of
from fedbilevel.theory.plan import Calibration, practical_plan
from fedbilevel.theory.theorems import Parameters
from tests.cases import ROWWISE, quadratic_data

# T1's own letters, with the values once measured with them.
_SERIES: dict[str, Any] = {"theta": 0.4, "q": 10, "sizes": (5, 6)}
BASE = {
    1: Calibration(
        1, 4000, Parameters(1, 7, 0.014, 8.0, 8.0, 1.0, 2.0, 7), **_SERIES, value=0.2446
    ),
    2: Calibration(
        2, 4000, Parameters(1, 7, 0.02, 2.0, 2.0, 1.0, 2.0, 64), **_SERIES, value=0.12
    ),
}
UNIT = "l0=1 l1=1 l21=1 l22=1 mu=0.5 sigma=0.1 phi0=1 y0=1".split()
GIVEN = [part for one in UNIT for part in ("--constant", one)]


_CHANGED = (
    "jax_enable_x64",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(scope="module", autouse=True)
def _single_precision():
    """Commands set the precision of the whole process: other tests need theirs back."""
    before = {name: getattr(jax.config, name) for name in _CHANGED}
    configure("float32")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def call(*arguments: str) -> dict:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 2
    return " ".join(done.output.split())


def test_an_exact_power_is_found_exactly():
    at = [1.0, 2.0, 8.0]
    curves = [np.full((4, 3), 5 * x**-0.7) for x in at]
    fit = fit_exponent(at, [Measured.of(c, lambda many: many[:, -1]) for c in curves])
    np.testing.assert_allclose([fit.exponent, fit.low, fit.high], -0.7)


def test_the_interval_covers_as_often_as_it_says():
    draw = np.random.default_rng(0)
    at, covered = [1.0, 4.0, 16.0], 0
    for _ in range(100):
        noise = draw.lognormal(0, 0.3, (3, 64, 1)) / np.exp(0.3**2 / 2)
        curves = np.asarray(at)[:, None, None] ** -0.5 * noise
        fit = fit_exponent(
            at, [Measured.of(c, lambda many: many[:, -1]) for c in curves]
        )
        covered += fit.low <= -0.5 <= fit.high
    assert 88 <= covered <= 100


@pytest.mark.parametrize(("theorem", "power"), [(1, 0.5), (2, 2 / 3), (3, 2 / 3)])
def test_practical_plans_scale_by_the_corollaries(theorem, power):
    letters = Parameters(1, 16, 0.01, 4.0, 4.0, 1.0, 1.0, 64)
    base = Calibration(theorem, 4096, letters, 0.4, 10, (5, 6), 0.3)
    same = practical_plan(base, 1, iterations=4096)
    assert (same.local_steps, same.q, same.first_batch) == (16, 10, 64)
    for K, T in ((16, 4096), (1, 16 * 4096)):
        plan = practical_plan(base, K, iterations=T)
        np.testing.assert_allclose(plan.promise, 0.3 * 16**-power)
        aimed = practical_plan(base, K, target=plan.promise * 1.0001)
        assert abs(aimed.iterations - T) <= 2e-3 * T
    more = practical_plan(base, 8, iterations=4096)
    longer = practical_plan(base, 1, iterations=8 * 4096)
    if theorem == 1:
        periods, weight, steps = (8**-0.75, 8**0.25), 1.0, (8**0.5, 8**-0.5)
    else:
        periods, weight, steps = (0.25, 2.0), 1 / 8, (4.0, 0.5)
    assert more.local_steps == round(16 * periods[0])
    assert longer.local_steps == round(16 * periods[1])
    assert (more.alpha, longer.alpha) == (4.0 * weight, 4.0)
    for plan, step in zip((more, longer), steps, strict=True):
        T = plan.iterations
        last = algorithm_by(plan, subject_of(theorem)).eta(T)  # pyright: ignore[reportAttributeAccessIssue]
        np.testing.assert_allclose(last, 0.01 * step, rtol=1e-6)


@pytest.mark.slow
def test_the_mean_of_a_run_does_not_depend_on_how_often_it_was_averaged():
    """One client is never averaged: p only says when the metric is looked at."""
    options = {"noise": "0", "eta": "0.05", "alpha": "8", "beta": "8", "q": "3"}
    means = []
    for period in (1, 50):
        run = Experiment(
            "quadratic",
            "local-bsgm",
            clients=1,
            rounds=400 // period,
            local_steps=period,
            options={**options, "rho1": "1", "rho2": "2"},
            safeguard=False,
        )
        means.append(metric_curves(run.build().setting, run.run_seeds(1))[0, -1])
    # Trapezoids would be off by half.
    np.testing.assert_allclose(means[1], means[0], rtol=0.1)


@pytest.mark.parametrize("theorem", [1, 2])
def test_targets_give_whole_local_steps(theorem):
    base = replace(BASE[theorem], value=0.12)
    periods = (2, 3, 4)
    for period, target in zip(periods, default_targets(base, 4, periods), strict=True):
        assert practical_plan(base, 4, target=target).local_steps == period


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_the_spread_leaves_the_averaged_problem_alone(clients):
    make = tasks.find("quadratic")
    alike, apart = make(clients), make(clients, spread=0.8)
    x = np.arange(5.0)
    np.testing.assert_allclose(
        alike.metrics.gradient(x), apart.metrics.gradient(x), rtol=2e-5
    )
    spectra = np.linalg.eigvalsh(np.asarray(apart.data.lower["A"])[:, 0])
    assert spectra.min() > 0.1
    differ = not np.allclose(apart.data.lower["a"], alike.data.lower["a"])
    assert differ == (clients > 1)
    with pytest.raises(InvalidInputError, match="strongly convex"):
        make(clients, spread=1.1)


@pytest.mark.slow
def test_the_error_falls_with_clients_as_claimed():
    """The reproduction of docs/theory.md in small: a quarter of the iterations."""
    settings = setting_of(Experiment("quadratic", "local-bsgvrm"))
    found = measure_speedup(settings, LocalBSGVRM, BASE[2], [1, 8], [1000], seeds=16)
    assert abs(found["exponent"] + 2 / 3) < 0.12
    assert found["low"] < found["exponent"] < found["high"]


@pytest.mark.slow
def test_iterations_to_a_target_fall_with_clients():
    settings = setting_of(Experiment("quadratic", "local-bsgm"))
    (target,) = default_targets(BASE[1], 4, (2,))
    found = measure_complexity(settings, LocalBSGM, BASE[1], [1, 4], [target], seeds=16)
    assert abs(found["exponent"] + 1) < 0.2
    one, four = (point["rounds"] for point in found["points"])
    assert 0.75 < four / one < 1.33  # claimed: rounds do not depend on K


def test_a_target_out_of_reach_is_told():
    plan, curves = practical_plan(BASE[1], 2, iterations=8), np.full((2, 4), 0.5)
    assert until(curves, 0.5, plan).value == plan.local_steps
    with pytest.raises(InvalidInputError, match="came to 0.5 .* a larger target"):
        until(curves, 0.4, plan)


@pytest.mark.slow
def test_a_plan_is_what_runs(tmp_path):
    file = tmp_path / "plan.json"
    plan = call("plan", "--preset", "theory", "--iterations", "60", "--clients", "3",
                "--algorithm", "local-bsgm", *GIVEN, "--out", str(file))  # fmt: skip
    assert plan["algorithm"] == "local-bsgm"
    assert plan["dominating"] in plan["terms"]
    assert not plan["notes"] and plan["rounds"] * plan["local_steps"] >= 60
    result = call("run", "quadratic", "--plan", str(file), "--set", "noise=0")
    assert result["algorithm"] == "local-bsgm"
    config = result["config"]
    assert config["clients"] == 3 and config["rounds"] == plan["rounds"]
    used = config["parameters"]
    for letter in ("alpha", "beta", "rho1", "rho2"):
        np.testing.assert_allclose(used[letter], plan[letter], rtol=1e-6)
    np.testing.assert_allclose(used["eta"], float(plan["eta"]), rtol=1e-6)
    assert result["counts"]["floats_up"] == 3 * plan["floats_up"]


@pytest.mark.slow
def test_what_a_plan_refuses(tmp_path):
    base = ["plan", "--preset", "theory", *GIVEN]
    assert "not both" in refused(*base, "--iterations", "9", "--target", "1")
    assert "not both" in refused(*base)
    assert "sigma" in refused(*base, "--constant", "sigm=1", "--target", "1")
    assert "theorem 3 is not about `LocalBSGM`" in refused(
        *base, "--target", "1", "--algorithm", "local-bsgm", "--theorem", "3"
    )
    broken = tmp_path / "plan.json"
    broken.write_text("{}")
    assert "not a plan" in refused("run", "quadratic", "--plan", str(broken))
    assert "no number" in refused(*base, "--target", "1e-30")
    practical = refused("plan", "--target", "1", "--set", "et=1")
    assert "unknown option 'et'" in practical


@pytest.mark.slow
def test_check_theory_tells_both_sides_and_what_to_do():
    options = "--algorithm local-bsgvrm --clients 8 --local-steps 4 --set theta=0.3"
    command = ["check-theory", "quadratic", *options.split(), "--rounds", "4"]
    found = call(*command)
    np.testing.assert_allclose(found["estimates"]["mu"]["value"], 0.5, rtol=1e-5)
    assert found["theorem"] == 2 and not found["holds"]
    broken = [one for one in found["conditions"] if not one["holds"]]
    assert broken and all(one["advice"] for one in broken)
    letters = [f"{name}={value!r}" for name, value in found["largest"].items()]
    obeyed = [part for one in letters for part in ("--set", one)]
    assert call(*command, *obeyed)["holds"]


@pytest.mark.slow
def test_a_calibration_keeps_to_what_it_is_told():
    short = Experiment("regularization", "local-bsgm", rounds=4, options={"q": "1"})
    told = calibrate(replace(short, options={"q": "1", "eta": "0.3"}), 1, 2)
    assert told.parameters.eta == 0.3 and told.iterations == 40
    # So early on longer steps are better, and they are tried.
    found = calibrate(short, 1, 2)
    assert found.parameters.eta > 1 and found.value < told.value


@pytest.mark.slow
def test_measuring_the_axes_by_the_command(tmp_path):
    small = ["speedup", "quadratic", "--set", "q=1", "--seeds", "2", "--clients", "2"]
    found = call(*small, "--iterations", "20,40", "--out", str(tmp_path))
    assert {"exponent", "low", "high", "points"} <= set(found)
    assert (found["task"], found["algorithm"]) == ("quadratic", "local-bsgvrm")
    assert [point["iterations"] for point in found["points"]] == [20, 40]
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved == found
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "which is the axis" in refused(*small, "--iterations", "20")


def test_the_criterion_has_its_term_in_y():
    """||grad Phi||^2 + (L1 + L1^2/mu)^2 ||y - y*||^2 of the averaged quadratics."""
    task = tasks.find("quadratic")(2, spread=0.5)
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal(5), draw.standard_normal(6)
    lower = task.data.lower
    A, C, a = (np.asarray(lower[n], float)[:, 0].mean(axis=0) for n in ("A", "C", "a"))
    b = np.asarray(task.data.upper["b"], float)[:, 0].mean(axis=0)
    best = -np.linalg.solve(A, C.T @ x + a)
    slope = 0.5 * x - C @ np.linalg.solve(A, best - b)
    L1 = max(np.linalg.norm(np.block([[np.zeros((5, 5)), C], [C.T, A]]), 2), 1.0)
    weight = L1 + L1**2 / np.linalg.eigvalsh(A)[0]
    expected = slope @ slope + weight**2 * (y - best) @ (y - best)
    kind = lower["A"].dtype
    found = task.metrics(x.astype(kind), y.astype(kind))
    np.testing.assert_allclose(found["criterion"], expected, rtol=1e-4)
    np.testing.assert_allclose(found["grad_norm_sq"], slope @ slope, rtol=1e-4)


def test_points_tell_the_criterion_where_metrics_do():
    setting = setting_of(Experiment("quadratic", "local-bsgm"))(2)
    flat: Any = [SimpleNamespace(columns={"criterion": np.full(3, 0.7)})] * 2
    ((name, value),) = criterion(replace(setting, metrics=None), flat).items()
    assert name == "criterion"
    np.testing.assert_allclose(value, 0.7, rtol=1e-6)
    other: Any = [SimpleNamespace(columns={"upper_loss": np.full(3, 0.7)})]
    assert criterion(setting, other) == {}


# A floor --------------------------------------------------------------------------


def test_a_floor_is_found_where_seeds_agree_and_refused_where_they_do_not():
    scales, draw = [1.0, 0.7, 0.5], np.random.default_rng(0)
    exact = 3 + np.outer(scales, [0.5, 0.6, 0.6, 0.7])
    np.testing.assert_allclose(floor_of(scales, exact, 3.6), 3)
    noisy = exact.mean(axis=1)[:, None] + 0.01 * draw.standard_normal((3, 64))
    assert 3 <= floor_of(scales, noisy, 3.6) < 3.02
    # Three seeds, and a metric that does not fall, say nothing.
    assert floor_of(scales, exact[:, :3], 3.5) == 3.5
    assert floor_of(scales, exact[::-1], 3.6) == 3.6


def test_only_what_is_above_a_floor_is_scaled():
    base = replace(BASE[1], value=2.4, floor=2.2)
    plan = practical_plan(base, 4, iterations=16000)
    np.testing.assert_allclose(plan.promise, 2.2 + 0.2 / 4)
    assert default_targets(base, 1, (14,)) == pytest.approx([2.2 + 0.2 / 4])
    with pytest.raises(
        InvalidInputError, match=r"target=2: .* below 2\.2, .* gave 2\.4"
    ):
        practical_plan(base, 4, target=2.0)
    unknown = replace(base, floor=2.4)
    with pytest.raises(InvalidInputError, match="nothing shows that .* below 2.4"):
        practical_plan(unknown, 4, target=2.3)


@pytest.mark.parametrize("seeds", [4, 16])
def test_noise_is_seldom_taken_for_a_fall(seeds):
    """Of metrics that do not fall, at most one in twenty is said to."""
    draw = np.random.default_rng(0)
    flat = 3 + draw.standard_normal((1000, 3, seeds))
    high = 100.0  # above any floor that is found, which is then told apart
    told = [floor_of([1.0, 0.7, 0.5], one, high) < high for one in flat]
    assert np.mean(told) <= 0.05


LEAST = 2 + 0.25  # of 2 + (y - 1)^2 / 2 + x^2 / 2 at y = x


def _with_a_floor(clients: int) -> ClientData:
    """Rows are noise of mean 0, so that y*(x) = x, and Phi is least at x = 1/2."""
    rows = np.asarray([-0.3, 0.3], np.float32)
    return ClientData.from_clients([rows] * clients, [rows] * clients)


@pytest.mark.slow
def test_no_plan_promises_less_than_the_minimum():
    problem = Problem(
        lambda x, y, rows: 2 + 0.5 * (y - 1) ** 2 + 0.5 * x**2 + y * rows.mean(),
        lambda x, y, rows: 0.5 * ((y - x - rows) ** 2).mean(),
    )
    start = (jax.numpy.zeros(()), jax.numpy.zeros(()))
    method = LocalBSGM(eta=0.2, alpha=2.0, beta=2.0, rho1=1.0, rho2=1.0,
                       hypergradient=Neumann(4, 0.5), local_steps=2)  # fmt: skip
    base = calibrate_objects(
        problem, _with_a_floor, start, method, iterations=256, seeds=16, search=False
    )
    assert LEAST <= base.floor < base.value < LEAST + 0.2
    for T in (344, 10**4, 10**8):
        plan = practical_plan(base, 8, iterations=T)
        assert LEAST <= plan.promise < base.value
        assert "not to fall below 2.2" in plan.notes[-1]
    # Scaled as if it tended to zero, as it was once, the same measurement would.
    assert practical_plan(replace(base, floor=0.0), 8, iterations=344).promise < LEAST
    with pytest.raises(InvalidInputError, match=r"target=2: .* below 2\.2.* ask for"):
        practical_plan(base, 8, target=2.0)
    aimed = practical_plan(base, 8, target=(base.floor + base.value) / 2)
    assert aimed.promise <= (base.floor + base.value) / 2


def test_what_a_server_holds_is_not_known_before_a_run():
    start = (jnp.ones(2), jnp.ones(3))
    made = Setting(
        ROWWISE, quadratic_data(2), start, lambda x, y: {"upper_loss": jnp.asarray(2.0)}
    )
    assert made.headline_at_start() == 2.0
    of_server = replace(made, metrics=lambda x, y, server: {"upper_loss": 2.0})
    assert of_server.headline_at_start() is None
    assert replace(made, metrics=None).headline_at_start() is None
