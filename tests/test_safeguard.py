"""What is kept of a guarded run, and what it costs to be guarded."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import _tree
from fedbilevel.algorithms import steadied
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import Guard, Move, Turned
from fedbilevel.experiments import Experiment
from fedbilevel.runtime.simulator import layout_for


@dataclass
class Listing:
    """The rules of the guard in plain Python, for a y of one number."""

    older: float
    recent: float
    kept: tuple[int, int] = (0, 0)
    usual: float = 0.0
    halvings: int = 0
    told: list[tuple[int, int]] = field(default_factory=list)

    def judged(self, y: float, about: tuple, turned: tuple, index: int) -> float:
        """Return the y to go on from after a round."""
        trouble, speed = about
        far = abs(y - self.recent) / speed
        own = abs(self.recent) / speed
        exploded = self.usual > 0 and far > max(100 * self.usual, own)
        bad = exploded or trouble >= 0.5 or not np.isfinite(y)
        turns, lost, too_fast, start = turned
        anew = too_fast if bad else turns and lost
        calm = index < 10 or far <= 10 * self.usual
        if bad or turns:
            self.told.append((index + 1, self.kept[0]))
        if bad and not anew:
            self.kept, self.recent = (self.kept[0], self.kept[0]), self.older
            self.halvings += 1
            return self.older
        if anew:
            self.kept, self.older, self.recent = (0, 0), start, start
            return start
        if index % 10 == 9 and calm:
            self.kept = (self.kept[1], index + 1)
            self.older, self.recent = self.recent, y
        grown = 2 * self.usual if index < 10 else self.usual
        self.usual = max(self.usual, min(far, grown) if self.usual > 0 else far)
        return y


@pytest.mark.parametrize("seed", range(8))
def test_a_guard_keeps_and_goes_back_as_written(seed):
    """Many rounds, of which some explode, break, or turn round."""
    draw, judged = np.random.default_rng(seed), jax.jit(Guard.judged)
    y = 1.0
    listing, guard = Listing(y, y), Guard.of(jnp.asarray(y), None)
    for index in range(150):
        y += draw.normal() * draw.choice([1, 1e6, np.nan], p=[0.97, 0.02, 0.01])
        trouble = draw.choice([0.0, 0.25, 0.5], p=[0.96, 0.02, 0.02])
        speed = 1.0 if index < 10 else draw.choice([1.0, 30.0])
        turns, lost, too_fast = draw.random(3) < (0.05, 0.5, 0.2)
        turned = (bool(turns), bool(lost), bool(too_fast), draw.normal())
        guard = replace(guard, trouble=jnp.asarray(trouble, "float32"))
        seen = Turned(*map(jnp.asarray, turned))
        move = Move(jnp.asarray(y), guard.recent(), jnp.asarray(speed, "float32"))
        now = (jnp.asarray(y), move, seen, index)
        y = listing.judged(y, (trouble, speed), turned, index)
        state, guard = judged(guard, *now)
        np.testing.assert_array_equal(state, y)
        np.testing.assert_array_equal(guard.recent(), listing.recent)
        assert sorted(guard.kept.tolist()) == list(listing.kept)
    assert int(guard.halvings) == listing.halvings > 1
    count = int(guard.happened)
    assert guard.rounds[:count, 1:].tolist() == [list(one) for one in listing.told]


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
