"""What noise costs, by formulas that stand here: no number is the package's own.

One release of a Gaussian mechanism of noise multiplier s has, at epsilon e, the delta
Phi(1/(2s) - e s) - exp(e) Phi(-1/(2s) - e s) (Balle and Wang 2018). Several together
are one of multiplier s with 1/s^2 = sum of 1/s_i^2.
"""

import json
import math
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import dp_accounting
import dp_accounting.rdp
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.channels import Mean, Median, Privacy, TopK
from fedbilevel.channels.accountant import epsilon, epsilon_of_events
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.federation.ledger import (
    ServerReleases,
    _newest,
    read_releases,
    write_releases,
)
from fedbilevel.federation.own_rows import Spent
from fedbilevel.runtime import privacy
from fedbilevel.runtime.job import ABSENT
from fedbilevel.runtime.privacy import (
    IN_THE_CLEAR,
    NoiseForecast,
    Release,
    epsilon_of,
    privacy_of_releases,
    privacy_spent,
    release_of,
)

DELTA = 1e-5


def normal(value):
    return math.erfc(-value / math.sqrt(2)) / 2


def exact(*multipliers, delta=DELTA):
    """Return the epsilon of releases of these multipliers, by bisection."""
    s = 1 / math.sqrt(sum(one**-2 for one in multipliers))
    low, high = 0.0, 200.0
    for _ in range(80):
        middle = (low + high) / 2
        tail = normal(-1 / (2 * s) - middle * s)
        spent = normal(1 / (2 * s) - middle * s) - math.exp(middle) * tail
        low, high = (middle, high) if spent > delta else (low, middle)
    return high


def near(value):
    return pytest.approx(value, rel=1e-6)


def test_one_release_costs_what_the_formula_says():
    # Known: noise 4.7 times a change has an epsilon of about .8 at a delta of 1e-5.
    assert exact(4.7) == pytest.approx(0.8, abs=0.05)
    for multiplier in (0.7, 2.0, 9.0):
        assert epsilon_of_events([(multiplier, 1)], DELTA) == near(exact(multiplier))
        assert epsilon_of_events([(multiplier, 1)], 1e-3) == near(
            exact(multiplier, delta=1e-3)
        )


def test_releases_of_several_kinds_add_up_in_inverse_squares():
    together = epsilon_of_events([(2.0, 3), (5.0, 2)], DELTA)
    assert together == near(exact(2.0, 2.0, 2.0, 5.0, 5.0))


def test_what_was_never_released_costs_nothing():
    events = [(2.0, 3), (0.0, 0), (7.0, 0)]
    assert epsilon_of_events(events, DELTA) == near(exact(2.0, 2.0, 2.0))
    assert epsilon_of_events([(0.0, 1), *events], DELTA) == math.inf
    assert epsilon_of_events([(0.0, 0)], DELTA) == 0


def test_blocks_and_absent_sites_take_noise_away():
    """Of b blocks, and m of n shares, noise is less by sqrt(b) and by sqrt(m / n)."""
    assert epsilon(3.0, 4, 2, 5, 5, DELTA) == near(exact(1.5, 1.5))
    assert epsilon(3.0, 1, 2, 8, 8, DELTA, 2) == near(exact(1.5, 1.5))
    found = epsilon(3.0, [1, 4, 1], 3, 8, 8, DELTA, [8, 8, 2])
    assert found == near(exact(3.0, 1.5, 1.5))
    found = epsilon(3.0, [4, 4, 1, *[0] * 7], 10, 5, 5, DELTA)
    assert found == near(exact(1.5, 1.5, 3.0))


@cache
def drawn(multiplier, times, participants, clients):
    """Return the bound for a cohort that is drawn, from the library itself."""
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    event = dp_accounting.GaussianDpEvent(multiplier / 2)  # replaced, it moves by 2 C
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(
        clients, participants, event
    )
    accountant.compose(sampled, times)
    return accountant.get_epsilon(DELTA)


def test_a_drawn_cohort_has_the_lesser_of_two_bounds():
    few = drawn(4.0, 10, 2, 100)
    assert few < exact(*[4.0] * 10)
    assert epsilon(4.0, 1, 10, 2, 100, DELTA) == near(few)
    # By sqrt(4) blocks less noise: 8 stands for 4.
    assert epsilon(8.0, 4, 10, 2, 100, DELTA) == near(few)


def test_a_drawn_cohort_of_nearly_all_is_no_gain():
    many = drawn(4.0, 10, 9, 10)
    assert many > exact(*[4.0] * 10)
    assert epsilon(4.0, 1, 10, 9, 10, DELTA) == near(exact(*[4.0] * 10))
    # Absence is not drawn, and all clients are no drawn cohort.
    assert epsilon(4.0, 1, 10, 2, 100, DELTA, 2) == near(exact(*[4.0] * 10))
    assert epsilon(4.0, 1, 10, 2, 2, DELTA) == near(exact(*[4.0] * 10))


def test_no_noise_is_no_bound_and_no_release_costs_nothing():
    assert epsilon_of_events([], DELTA) == 0
    assert epsilon_of_events([(2.0, 1), (0.0, 1)], DELTA) == math.inf
    assert epsilon_of_events([(2.0, 1), (0.9e-9, 1)], DELTA) == math.inf
    # So much noise that its square is no number hides everything.
    assert epsilon_of_events([(1e300, 1)], DELTA) == 0
    assert epsilon_of_events([(2.0, 1), (1e300, 9)], DELTA) == near(exact(2.0))


# A job, as far as its privacy is asked for.


def job_of(
    noise: Any = 2.0,
    participants=4,
    clients=4,
    coders=(),
    reduction=None,
    attendance=None,
    gathers=False,
    everyone=False,
) -> Any:
    coder = None if noise is None else Privacy(1.5, noise, participants, DELTA)
    phase = SimpleNamespace(gathers=gathers, everyone=everyone)
    quiet = SimpleNamespace(gathers=False, everyone=False)
    return SimpleNamespace(
        channel=SimpleNamespace(
            privacy=coder, coders=(coder, *coders), reduction=reduction or Mean()
        ),
        clients=clients,
        key=None,
        attendance=attendance,
        every_phase=lambda: {("rounds", 0): quiet, ("rounds", 1): phase},
    )


def spent_by(monkeypatch, job, blocks, keeps=()):
    monkeypatch.setattr(privacy, "start_kept", lambda job: keeps)
    ledger: Any = SimpleNamespace(blocks=lambda key, rounds: np.asarray(blocks))
    return privacy_spent(job, ledger, 3)


def test_a_run_pays_for_every_exchange_that_has_blocks(monkeypatch):
    found = spent_by(monkeypatch, job_of(), [1, 0, 4])
    assert found == {"epsilon": near(exact(2.0, 1.0)), "delta": DELTA}
    assert spent_by(monkeypatch, job_of(noise=0.0), [1]) == {}
    assert spent_by(monkeypatch, job_of(noise=None), [1]) == {}


def test_who_was_absent_brought_no_noise(monkeypatch):
    came, gone = ABSENT + 1, ABSENT
    record = [[came] * 4, [came, gone, gone, gone], [gone] * 4]
    # What was recorded beyond the exchanges of the run counts for nothing.
    job = job_of(attendance=record)
    found = spent_by(monkeypatch, job, [1, 1])
    assert found["epsilon"] == near(exact(2.0, 1.0))
    # Exchanges without blocks are left out with their own attendance.
    found = spent_by(monkeypatch, job_of(attendance=record[:2]), [0, 1])
    assert found["epsilon"] == near(exact(1.0))


ALONE = {"coders": (TopK(0.5),)}, {"reduction": Median()}, {"gathers": True}


@pytest.mark.parametrize("how", ALONE)
def test_a_reply_that_is_seen_alone_has_its_own_noise_only(how, monkeypatch):
    found = spent_by(monkeypatch, job_of(**how), [1, 1])
    assert found["epsilon"] == near(exact(1.0, 1.0))  # 2 / sqrt(4)
    assert release_of(job_of(**how), 3, 4).shares == 1


def test_a_cohort_hides_where_clients_keep_nothing_and_not_all_answer(monkeypatch):
    few = {"noise": 4.0, "participants": 2, "clients": 100}
    hidden, seen = drawn(4.0, 10, 2, 100), exact(*[4.0] * 10)
    exchanges = [1] * 10
    assert spent_by(monkeypatch, job_of(**few), exchanges)["epsilon"] == near(hidden)
    kept = spent_by(monkeypatch, job_of(**few), exchanges, keeps=(jnp.ones(2),))
    assert kept["epsilon"] == near(seen)
    all_asked = spent_by(monkeypatch, job_of(**few, everyone=True), exchanges)
    assert all_asked["epsilon"] == near(seen)
    apart = spent_by(monkeypatch, job_of(**few, gathers=True), exchanges)
    assert apart["epsilon"] == near(exact(*[4.0 / math.sqrt(2)] * 10))


def test_a_release_has_the_multiplier_of_its_shares_and_blocks():
    assert Release(3.0, 8, 4, 2, DELTA).multiplier == 3.0 / 4
    assert Release(3.0, 8, 1, 8, DELTA).multiplier == 3.0
    assert Release(3.0, 8, 0, 8, DELTA).multiplier == 3.0
    assert release_of(job_of(), 3, 2) == Release(2.0, 4, 3, 2, DELTA)
    assert release_of(job_of(noise=0.0), 3, 2) == IN_THE_CLEAR == (0, 1, 1, 1, 0)
    assert IN_THE_CLEAR.multiplier == 0


def test_releases_of_all_runs_are_paid_for_together():
    one, other = Release(3.0, 8, 4, 2, 0.1), Release(2.0, 1, 1, 1, 0.2)
    assert epsilon_of({one: 2, other: 1}, DELTA) == near(exact(0.75, 0.75, 2.0))
    # Nothing that was sent without blocks is hidden by noise; none costs nothing.
    empty = Release(1.0, 1, 0, 1, DELTA)
    assert epsilon_of({empty: 5, other: 1}, DELTA) == near(exact(2.0))
    assert epsilon_of({IN_THE_CLEAR: 0, other: 1}, DELTA) == near(exact(2.0))
    assert epsilon_of({IN_THE_CLEAR: 1, other: 1}, DELTA) == math.inf
    assert epsilon_of({Release(0.0, 1, 0, 1, 0.0): 1}, DELTA) == math.inf


def test_releases_of_a_job_are_priced_and_counted():
    found = privacy_of_releases(job_of(), {(1, 4): 2, (4, 1): 1, (0, 4): 9, (1, 3): 0})
    assert found["epsilon"] == near(exact(2.0, 2.0, 0.5))
    assert (found["delta"], found["releases"]) == (DELTA, 3)
    assert privacy_of_releases(job_of(noise=0.0), {(1, 4): 2}) == {}
    # Seen alone, sums of another size are the same release.
    found = privacy_of_releases(job_of(gathers=True), {(1, 4): 2, (1, 3): 1})
    assert found["epsilon"] == near(exact(1.0, 1.0, 1.0)) and found["releases"] == 3


def test_a_forecast_grows_with_the_root_of_the_exchanges():
    made = NoiseForecast(participants=6, size=25, exchanges=16, each=0.5)
    assert made.whole == 2.0
    assert str(made) == (
        "the signal of 6 sites is at most 0.5 of the noise in an exchange, in a block "
        "of 25 numbers, and at most 2 of it over 16 exchanges"
    )


def test_a_server_counts_what_it_asks_and_corrects_it_by_what_came(tmp_path):
    path = tmp_path / "releases.json"
    held = ServerReleases(path)
    held.ask(3, 4)
    assert path.read_text() == "[[3, 4, 1]]\n"
    held.settle(3, 4, 0, 0)  # asked, and computed, though nothing arrived
    assert ServerReleases(path).counts == {(3, 4): 1}
    held.ask(3, 4)
    held.settle(3, 4, 2, 3)  # three came, two made the mean
    assert ServerReleases(path).counts == {(3, 4): 1, (3, 2): 1}
    held.ask(3, 4)
    held.settle(3, 4, 0, 3)  # no mean, and yet three were seen
    assert ServerReleases(path).counts == {(3, 4): 1, (3, 2): 1, (3, 3): 1}
    held.ask(3, 4)
    held.settle(3, 4, 0, None)  # nobody was asked
    assert ServerReleases(path).counts == {(3, 4): 1, (3, 2): 1, (3, 3): 1}
    assert ServerReleases(tmp_path / "none.json").counts == {}


def test_releases_are_written_and_read_again():
    held = Counter({(3, 2): 1, (1, 4): 5, (2, 2): 0})
    assert write_releases(held) == [[1, 4, 5], [3, 2, 1]]
    assert read_releases([[1, 4, 5], [3, 2, 1], [1, 4, 2]]) == {(1, 4): 7, (3, 2): 1}
    assert read_releases([[0, 0, 0]]) == {(0, 0): 0}
    for wrong in ([-1, 1, 1], [1, -1, 1], [1, 1, -1], [1, 1, True], [1.0, 1, 1]):
        with pytest.raises(ValueError, match="a release of"):
            read_releases([wrong])


def test_of_very_many_federations_the_oldest_is_forgotten():
    held: dict = {}
    for number in range(64):
        held = _newest(held, str(number), number)
    assert list(held) == [str(number) for number in range(64)]
    held = _newest(held, "3", "again")
    assert len(held) == 64 and list(held)[-1] == "3" and held["3"] == "again"
    held = _newest(held, "new", 1)
    assert len(held) == 64 and "0" not in held and "1" in held


ONE = Release(2.0, 4, 3, 2, DELTA)


def test_what_was_spent_is_written_and_read_again(tmp_path):
    assert (Spent().exchanges, Spent().measurements) == (0, 0)
    spent = Spent(3, 2, Counter({ONE: 3, IN_THE_CLEAR: 2}))
    spent.measured, spent.concluded = {"f": [1, 2, "x"]}, {"f": "y"}
    spent.given = {"f": "z"}
    path = tmp_path / "aa.ledger.json"
    spent.write(path)
    assert Spent.read(path) == spent
    assert path.stat().st_mode & 0o777 == 0o600


def test_ledgers_of_rows_in_common_are_added_up():
    one = Spent(3, 2, Counter({ONE: 3}), {"f": [1, 9, "x"], "g": [1]}, {"f": "y"})
    other = Spent(10, 5, Counter({ONE: 4, IN_THE_CLEAR: 1}), {"f": [2, 1, "w"]})
    other.concluded, one.given, other.given = {"g": "v"}, {"f": "a"}, {"f": "b"}
    both = one + other
    assert (both.exchanges, both.measurements) == (13, 7)
    assert both.releases == {ONE: 7, IN_THE_CLEAR: 1}
    assert both.measured == {"f": [2, 1, "w"], "g": [1]}  # the later of each
    assert (other + one).measured == both.measured
    assert both.concluded == {"f": "y", "g": "v"}
    assert both.given == {"f": "a"}  # its own, which can be given again


def test_a_ledger_of_an_earlier_version_counts_all_as_in_the_clear(tmp_path):
    path = tmp_path / "client-0.ledger.json"
    path.write_text(
        '{"exchanges": 3, "measurements": 4, "measured": {}, "concluded": {}}'
    )
    assert Spent.read(path).releases == {IN_THE_CLEAR: 7}


GOOD = {"noise": 1.0, "participants": 2, "blocks": 1, "shares": 1, "delta": 0.1}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"noise": 0}, True),
        ({"blocks": 0, "shares": 0, "delta": 0}, True),
        ({"participants": 0}, False),
        ({"participants": -1}, False),
        ({"blocks": -1}, False),
        ({"shares": -1}, False),
        ({"shares": 0.5}, False),
        ({"blocks": 1.0}, False),
        ({"participants": 2.0}, False),
        ({"noise": -0.5}, False),
        ({"noise": True}, False),
        ({"noise": math.inf}, False),
        ({"delta": math.nan}, False),
        ({"delta": -1}, False),
        ({"times": -1}, False),
        ({"times": 1.0}, False),
        ({"times": 0}, True),
    ],
)
def test_a_written_release_is_read_only_if_it_can_be_one(change, taken, tmp_path):
    one = {**GOOD, "times": 1, **change}
    held = {"exchanges": 1, "measurements": 0, "releases": [one], "measured": {}}
    held |= {"concluded": {}, "given": {}}
    path = tmp_path / "aa.ledger.json"
    path.write_text(json.dumps(held))
    if taken:
        assert Spent.read(path).releases.total() == one["times"]
        return
    with pytest.raises(CheckpointError, match="is damaged"):
        Spent.read(path)


def test_delta_and_noise_must_be_in_range():
    for noise, delta in ((0.0, DELTA), (-1.0, DELTA), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(InvalidInputError, match="there is an epsilon for noise"):
            epsilon(noise, 1, 1, 1, 1, delta)
    with pytest.raises(InvalidInputError, match="delta=1"):
        epsilon_of_events([(2.0, 1)], 1.0)
