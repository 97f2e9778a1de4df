"""Measured steps on losses that a user may write: kinks, and curvature of any sign."""

import html
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.wrappers.measured_steps.best import Best
from fedbilevel.algorithms.wrappers.measured_steps.curvature import Softness
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import MOST, Guard
from fedbilevel.errors import DivergedError, InterventionWarning, NonFiniteError
from fedbilevel.result import Result
from fedbilevel.studies import comparison, seeds

DRAW = np.random.default_rng(0)


def rows(count=24, width=4):
    a = DRAW.normal(size=(count, width))
    return {"a": a, "t": a @ np.arange(width) + DRAW.normal(size=count)}


DATA = fb.ClientData.from_clients(
    [rows() for _ in range(3)], [rows() for _ in range(3)]
)
START = (jnp.zeros(()), {"w": jnp.full(4, 0.5), "b": jnp.full(2, 0.5)})


def upper(x, y, batch):
    return jnp.mean((batch["a"] @ y["w"] + y["b"][0] - batch["t"]) ** 2)


def with_kink(x, y, batch):
    """Pull b to the kink of its norm, where it curves without bound."""
    pull = jnp.linalg.norm(y["b"])
    return upper(x, y, batch) + pull + 0.01 * jnp.exp(x) * y["w"] @ y["w"]


def state_of(problem, start=START, data=DATA, rounds=60, **named):
    """Return what the server carried in the end, with the result."""
    kept = []

    class Kept(fb.SimulatorRuntime):
        def fetch(self, state):
            kept.append(super().fetch(state))
            return kept[-1]

    method = fb.SteadySteps(fb.FedBiOControls(local_steps=2))
    sampling = fb.Sampling(None)
    run = {"rounds": rounds, "sampling": sampling, "runtime": Kept, **named}
    result = fb.run(problem, data, start, method, **run)
    return kept[-1].server, result


def test_a_kink_does_not_stop_the_lower_level():
    """By Hessian products L grows past 1e6 here, and w stood still."""
    state, result = state_of(fb.Problem(upper, with_kink))
    assert float(state.curvature) < 1e3
    best = jnp.linalg.norm(result.y["b"])
    assert best < 0.2 and result.final["upper_loss"] < 3


def hinge(x, y, batch):
    sign = jnp.sign(batch["t"])
    return jnp.mean(jnp.maximum(0, 1 - sign * (batch["a"] @ y["w"])))


def test_a_loss_without_curvature_has_steps_of_the_size_of_y():
    """A hinge curves nowhere: the first step would be 1e29 long."""
    state, result = state_of(fb.Problem(hinge, hinge), rounds=30)
    assert 1e-3 < float(state.curvature) < 1e6
    assert result.final["upper_loss"] < 0.5 and np.isfinite(result.y["w"]).all()


def either(x, y, batch):
    """A lower level that curves downward along the last number of b, or nowhere.

    One program serves both: which of them it is, the rows say.
    """
    pulls = jnp.exp(x) * (y["w"] @ y["w"] + batch["convex"][0] * y["b"] @ y["b"])
    return upper(x, y, batch) + pulls + (1 - batch["convex"][0]) * jnp.cos(y["b"][1])


def above(x, y, batch):
    return upper(x, y, batch) + 0.1 * (y["b"][1] - 0.3) ** 2


def curved(convex: bool):
    """Return the end of a run of 80 rounds on one of the two."""
    rows = {**DATA.upper, "convex": np.full(DATA.upper["t"].shape, float(convex))}
    data = replace(DATA, upper=rows, lower=rows)
    start = (START[0], {**START[1], "b": jnp.zeros(2)})
    return state_of(fb.Problem(above, either), start, data=data, rounds=80)


def test_where_the_lower_level_curves_downward_z_is_damped_and_it_is_reported():
    state, result = curved(convex=False)
    assert float(state.softness.damping) > 0
    assert any("curves downward" in one for one in result.events)
    assert float(jnp.linalg.norm(state.server.point.z["b"])) < 20


def test_where_it_is_strongly_convex_nothing_is_damped():
    state, result = curved(convex=True)
    assert float(state.softness.damping) == 0
    assert not any("damped" in one for one in result.events)


def test_the_damping_is_what_is_missing_and_falls_slowly():
    soft = Softness.of(jnp.float32)
    for _ in range(60):
        soft = soft.seen(jnp.asarray(-0.2), jnp.asarray(True))
    np.testing.assert_allclose(soft.damping, 1.5 * (1e-5 + 0.2), rtol=1e-4)
    after = soft.seen(jnp.asarray(5.0), jnp.asarray(True))
    np.testing.assert_allclose(after.damping, 0.97 * soft.damping, rtol=1e-6)
    same = soft.seen(jnp.asarray(5.0), jnp.asarray(False))
    assert float(same.along) == float(soft.along)


# What a run returns ------------------------------------------------------------------


def best_of(losses, slopes):
    best = Best.of(fb.Pair(jnp.zeros(()), jnp.zeros(())))
    for done, (loss, slope) in enumerate(zip(losses, slopes, strict=True), 1):
        here = fb.Pair(jnp.asarray(float(done)), jnp.zeros(()))
        columns = {"upper_loss": loss, "lower_gradient_norm": slope}
        best = best.seen(here, columns, jnp.asarray(done))
    return best, best.is_better_than(losses[-1], slopes[-1])


@pytest.mark.parametrize(
    ("losses", "slopes", "place"),
    [
        ([2.0, 0.5, 0.4, 3.0], [1.0, 0.3, 0.2, 9.0], 3),  # it came apart
        ([2.0, 0.5, 0.4, 2.3], [1.0, 0.3, 0.2, 0.0], 3),  # a network that died
        ([2.0, 0.5, 0.4, 0.405], [1.0, 0.3, 0.2, 0.2], None),  # as good
        ([2.0, 0.5, 0.4, np.nan], [1.0, 0.3, 0.2, np.nan], 3),
        ([np.nan, 0.5, 0.4, 0.6], [np.nan, 0.3, 0.2, 0.2], 3),
        ([1.0, 1.5, 2.0, 2.5], [1.0, 0.5, 0.2, 0.1], None),  # minimax: y is on its way
        ([1.0, 1.5, 2.0, 9.5], [1.0, 2.0, 4.0, 8.0], 1),  # it went wrong from the start
    ],
)
def test_the_best_point_is_returned_where_it_is_clearly_better(losses, slopes, place):
    best, is_better = best_of(losses, slopes)
    assert is_better == (place is not None)
    if place is not None:
        assert int(best.round) == place == float(best.point.x)


def rising(x, y, batch):
    """Judge w early, and let it go on to fit rows of its own."""
    return jnp.mean((batch["a"] @ (y["w"] - 0.4 * jnp.arange(4.0))) ** 2)


def test_a_result_keeps_the_best_point_and_the_last(tmp_path):
    problem = fb.Problem(rising, with_kink)
    named = {"rounds": 12, "sampling": fb.Sampling(None)}
    kept = fb.Keeping(tmp_path / "run")
    with pytest.warns(InterventionWarning) as warned:
        made = fb.run(problem, DATA, START, **named, keeping=kept)
    (told,) = [str(one.message) for one in warned]
    assert told.startswith(f"automatic intervention: {'; '.join(made.events)}.")
    note = f"Note: {made.events[-1]}"
    assert note in repr(made) and html.escape(note) in made._repr_html_()
    assert made.summary()["events"] == made.events
    losses = made.columns["upper_loss"]
    best = int(np.argmin(losses))
    assert best < len(losses) - 1 and made.final["upper_loss"] == losses[best]
    place = int(made.columns["round"][best])
    assert f"after round {place}," in made.events[-1]
    assert not np.array_equal(made.last["y.w"], made.point["y.w"])
    read = Result.load(tmp_path / "run")
    np.testing.assert_array_equal(read.last["y.w"], made.last["y.w"])
    np.testing.assert_array_equal(read.point["y.w"], made.point["y.w"])


@pytest.mark.parametrize("study", ["sweep", "compare"])
def test_a_sweep_and_a_comparison_warn_once_of_all_their_runs(study, monkeypatch):
    quiet, loud = (
        Result("t", "FedBiO", {"seed": seed}, {}, {}, {}, {}, {}, {}, events=told)
        for seed, told in ((3, []), (4, ["step sizes were halved"]))
    )
    results = [quiet, loud, DivergedError("lost"), replace(loud, config={"seed": 5})]
    finished = [one for one in results if isinstance(one, Result)]
    made = fb.Comparison("upper_loss", {"one": finished[:2], "two": finished[2:]})
    monkeypatch.setattr(seeds, "swept", lambda *_, **__: results)
    monkeypatch.setattr(comparison, "compared", lambda *_, **__: made)
    method = fb.FedBiO(0.1, 0.1, 0.1, local_steps=1)
    given = {"one": method} if study == "compare" else method
    problem = fb.Problem(rising, with_kink)
    with pytest.warns(InterventionWarning) as warned:
        getattr(fb, study)(problem, DATA, START, given, rounds=2, seeds=[3, 4])
    (told,) = warned
    assert str(told.message).startswith(
        "automatic intervention in 2 of 3 runs, the first of them FedBiO with seed 4: "
        "step sizes were halved."
    )
    assert told.filename == __file__


def test_an_algorithm_given_by_hand_keeps_its_last_point():
    method = fb.FedBiO(0.0, 0.05, 0.05, local_steps=2)
    named = {"rounds": 12, "sampling": fb.Sampling(None)}
    made = fb.run(fb.Problem(rising, with_kink), DATA, START, method, **named)
    assert made.final["upper_loss"] == made.columns["upper_loss"][-1] and not made.last


def test_a_run_that_could_not_be_held_ends_with_an_error():
    y = jnp.zeros(())
    guard = Guard.of(y, fb.Pair(None, y))
    assert guard.gave_up() == ""
    known = {"first": 1.0, "best": 0.5, "total": 40.0, "count": 10.0}
    numbers = {name: jnp.asarray(one) for name, one in known.items()}
    record = replace(guard.record, **numbers)
    said = replace(guard, record=record, halvings=jnp.asarray(MOST)).gave_up()
    assert "rolled back 12 times" in said and "1 in the first rounds" in said


@pytest.mark.slow
def test_without_an_algorithm_steps_are_measured():
    problem = fb.Problem(upper, with_kink)
    named = {"rounds": 4, "sampling": fb.Sampling(None)}
    given = fb.SteadySteps(
        fb.FedBiOControls(
            fb.OfDistance(1.0), fb.OfCurvature(0.5), fb.OfCurvature(0.5), local_steps=5
        )
    )
    one = fb.run(problem, DATA, START, **named)
    for other in (given, fb.FedBiOControls(local_steps=5)):
        same = fb.run(problem, DATA, START, other, **named)
        np.testing.assert_array_equal(one.x, same.x)
    assert issubclass(NonFiniteError, DivergedError)
