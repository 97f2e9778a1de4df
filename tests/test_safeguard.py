"""What is kept of a guarded run, and what it costs to be guarded."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import _tree
from fedbilevel._types import Pair
from fedbilevel.algorithms import steadied
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import (
    MOST,
    Guard,
    Move,
)
from fedbilevel.experiments import Experiment
from fedbilevel.runtime.simulator import layout_for


@dataclass
class Listing:
    """The rules of the guard in plain Python, for a y of one number."""

    kept: Any
    before: Any
    stood: int = 0
    usual: Any = 0.0
    halvings: int = 0
    losses: list[float] = field(default_factory=list)
    first: Any = np.inf
    best: Any = np.inf
    slope: Any = np.inf
    steep: Any = np.inf
    events: list[tuple[int, int]] = field(default_factory=list)

    def judged(self, y: Any, about: tuple, turned: tuple, index: int) -> Any:
        """Return the y to go on from after a round."""
        trouble, speed, loss, curvature = about
        turns, leapt = turned
        self.losses.append(loss)
        far, due = abs(y - self.before) / speed, index % 10 == 9
        exploded = self.usual > 0 and far > max(
            100 * self.usual, abs(self.before) / speed
        )
        exploded = exploded or trouble >= 0.5 or not np.isfinite(y) or leapt
        good, grew = self._ten(far * curvature, exploded) if due else (True, False)
        returned = (exploded or grew) and self.halvings < MOST
        if returned or (turns and len(self.events) - self.halvings < MOST):
            self.events.append((index + 1, self.stood))
        if returned:
            self.halvings += 1
            self.losses, self.before = [], self.kept
            return self.kept
        calm = index < 10 or far <= 10 * self.usual
        if due and calm and good:
            self.kept, self.stood = y, index + 1
        if due:
            self.before = y
        grown = 2 * self.usual if index < 10 else self.usual
        self.usual = max(self.usual, min(far, grown) if self.usual > 0 else far)
        return y

    def _ten(self, slope: float, exploded: bool) -> tuple[bool, bool]:
        """Return whether the rounds were good, and whether they were bad."""
        mean = np.mean(self.losses)
        error = np.std(self.losses) / np.sqrt(len(self.losses))
        known = np.isfinite(self.best)
        fell, noise = (self.first - self.best) if known else 0.0, 4 * error
        good = mean <= self.best + error or slope <= 1.5 * self.slope
        bad = fell > noise and mean > self.best + 0.1 * fell + noise
        bad = bad and slope > max(3 * self.slope, self.steep)
        if not exploded:
            if np.isinf(self.first):
                self.first, self.steep = mean, slope
            self.best = min(self.best, mean)
            self.slope, self.losses = min(self.slope, slope), []
        return good, bad


def of_y(y) -> Pair:
    return Pair(None, jnp.asarray(y))


@pytest.mark.parametrize("seed", range(8))
def test_a_guard_keeps_and_goes_back_as_written(seed):
    """Many rounds, of which some explode, break, turn, or lose what they gained."""
    draw, judged = np.random.default_rng(seed), jax.jit(Guard.judged)
    y, level = np.float32(1), 3.0
    listing, guard = Listing(y, y), Guard.of(jnp.asarray(y), of_y(y))
    for index in range(120):
        level += draw.choice([-0.05, 0.0, 0.6], p=[0.6, 0.3, 0.1])
        y += np.float32(
            draw.normal() * draw.choice([1, 1e6, np.nan], p=[0.98, 0.01, 0.01])
        )
        trouble = draw.choice([0.0, 0.25, 0.5], p=[0.97, 0.02, 0.01])
        speed = 1.0 if index < 10 else draw.choice([1.0, 30.0])
        loss, curvature = level + 0.1 * draw.normal(), draw.choice([1.0, 4.0])
        turned = tuple(bool(one) for one in draw.random(2) < (0.05, 0.01))
        guard = replace(
            guard,
            trouble=jnp.asarray(trouble, "float32"),
            record=guard.record.seen(jnp.asarray(loss, "float32")),
        )
        move = Move(
            of_y(y),
            of_y(guard.kept),
            jnp.asarray(speed, "float32"),
            jnp.asarray(curvature, "float32"),
            *map(jnp.asarray, turned),
        )
        now = (jnp.asarray(y), move, index)
        about = (trouble, speed, loss, curvature)
        y = np.float32(listing.judged(y, about, turned, index))
        state, guard = judged(guard, *now)
        np.testing.assert_array_equal(state, y)
        np.testing.assert_array_equal(guard.before.y, listing.before)
        np.testing.assert_array_equal(guard.kept, listing.kept)
    assert int(guard.halvings) == listing.halvings > 1
    count = int(guard.happened)
    assert guard.rounds[:count, 1:].tolist() == [list(one) for one in listing.events]


@pytest.mark.slow
def test_states_to_go_back_to_do_not_change_how_clients_are_laid_out():
    """They stay on the server: all clients at once, or one, as without a safeguard."""
    setting = Experiment("regularization", "fedbio", 8).build().setting
    algorithm = FedBiO(0.1, 0.1, 0.1, local_steps=2)
    plain, guarded = (
        layout_for(setting.job(steadied(algorithm, safeguard)), None)
        for safeguard in (False, True)
    )
    assert guarded == plain and plain.at_once is None


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "int32"])
def test_any_number_that_is_not_finite_is_found(kind):
    fine = jnp.ones((7, 5), kind)
    check = jax.jit(_tree.all_finite)
    assert check({"a": fine, "b": -fine, "none": jnp.zeros((0, 3), kind)})
    assert check(jnp.asarray(np.finfo("float32").max)) and check({})
    for bad in () if kind == "int32" else (np.nan, np.inf, -np.inf):
        for place in ((0, 0), (3, 2), (6, 4)):
            assert not check((fine, fine.at[place].set(bad)))
