"""Small rules that a mistake drawn at random had got by, one test for each."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedbilevel as fb
from fedbilevel import _evaluation
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import Guard
from fedbilevel.channels import Privacy
from fedbilevel.channels.coders import Levels, Quantize
from fedbilevel.datasets import Dataset, Preparation
from fedbilevel.datasets.preparation import ClassLabel, NumericColumn
from fedbilevel.errors import CheckpointError, FedbilevelError, InvalidInputError
from fedbilevel.estimators import at_both
from fedbilevel.evaluation.metrics import _area
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.memory import _more_devices
from fedbilevel.experiments.served_model import _made_up
from fedbilevel.experiments.tuning import SEARCHED
from fedbilevel.federation.checkpoints import Newest
from fedbilevel.federation.ledger import ServerReleases
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.server.measuring import (
    _LARGEST_WHOLE,
    read_conclusion,
    together,
)
from fedbilevel.federation.wire import Header, digest
from fedbilevel.hypergradient.conjugate_gradient import solve_if_convex
from fedbilevel.models.checkpoints import Config
from fedbilevel.report.page.sites import _site
from fedbilevel.sklearn import FederatedCleaner
from fedbilevel.studies import single
from fedbilevel.tasks import _rows
from fedbilevel.theory.plan import _given_or_least
from tests.cases import quadratic_data, quadratic_job
from tests.federation import Loopback, server_of, site_of
from tests.test_federation import BSGM
from tests.test_hostile_packets import lying, with_info


def test_what_a_server_asked_for_is_counted_over_restarts(tmp_path):
    path = tmp_path / "releases.json"
    first = ServerReleases(path)
    assert not first.counts
    for _ in range(3):
        first.ask(2, 5)
    first.ask(1, 5)
    first.settle(1, 5, 4, 4)
    assert ServerReleases(path).counts == {(2, 5): 3, (1, 4): 1}
    path.write_text("[[1, -1, 2]]")
    with pytest.raises(CheckpointError, match="epsilon is not known"):
        ServerReleases(path)


@pytest.mark.parametrize("value", [0, 3, -3, 0.5, _LARGEST_WHOLE - 1])
def test_a_site_concludes_with_numbers(value):
    assert read_conclusion({"a": value}, {"a": "number"}) == {"a": value}


@pytest.mark.parametrize(
    "value", [_LARGEST_WHOLE, -_LARGEST_WHOLE, math.inf, math.nan, True, "3", None]
)
def test_a_site_does_not_conclude_with_what_is_no_number(value):
    with pytest.raises(RefusedError, match="a cannot be"):
        read_conclusion({"a": value}, {"a": "number"})


def test_numbers_of_conclusions_are_averaged_and_texts_are_listed():
    told = [{"a": 1, "b": ["x"]}, {"a": 2.0, "b": ["y"]}, {"b": ["z"]}]
    assert together(told) == {"a": 1.5, "b": [["x"], ["y"], ["z"]]}


@pytest.mark.parametrize("scale", [math.inf, math.nan, -1e-30])
def test_a_scale_that_is_none_is_impossible(scale):
    coder, like = Quantize(4), jax.ShapeDtypeStruct((3,), jnp.dtype("float32"))
    coded = Levels(jnp.asarray(scale), jnp.zeros(3, jnp.int8))
    assert "has the scale" in coder.why_impossible(coded, like)
    assert not coder.why_impossible(Levels(jnp.asarray(1e30), coded.levels), like)


def test_noise_alone_is_that_of_one_site():
    assert Privacy(1.0, 2.0).participants == 1


def test_a_client_does_not_stand_after_what_is_asked_of_it():
    asked = Header("exchange", "f", "s", "a", 0, 1, number=1, exchange=5)
    for accepted, kept in ((4, 4), (4, 0), (0, 0)):
        Newest().check(_standing(asked, accepted, kept))
    for accepted, kept in ((5, 0), (6, 0), (3, 4)):
        with pytest.raises(RefusedError, match="jump"):
            Newest().check(_standing(asked, accepted, kept))
    # Whoever measures may stand at the last exchange.
    Newest().check(_standing(asked, 5, 5, kind="measure"))


def _standing(header, accepted, kept, kind="exchange"):
    known = {**vars(header), "accepted": accepted, "kept": kept, "kind": kind}
    return Header(**known)


def test_names_of_leaves_have_128_bits():
    names = {digest(np.arange(n)) for n in range(5)}
    assert len(names) == 5 and {len(name) for name in names} == {32}


def test_cohorts_are_kept_apart_where_that_is_asked_for():
    any_of_them, apart = Cohorts(2), Cohorts(2, apart=True)
    for one in (any_of_them, apart):
        assert one.enter(Question("s", "a"), (0, 1, 2)) is None
    assert any_of_them.enter(Question("s", "b"), (0, 1)) is None
    assert apart.enter(Question("s", "b"), (0, 1, 2)) is None
    for settings in ("s", "t"):
        for members in ((0, 1), (3, 4), (0, 1, 2, 3, 4)):
            told = apart.enter(Question(settings, "c"), members)
            assert "clients (0, 1, 2), and are over no others" in str(told)
    assert len(apart.sums) == 2


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["holds", "concludes"])
def test_a_hello_whose_flags_are_none_is_not_taken(flag):
    job, told = quadratic_job(BSGM, quadratic_data(3)), []
    script = lying(12, "hello", lambda answer: with_info(answer, **{flag: "yes"}))
    net = Loopback({10 + k: site_of(job, k) for k in range(3)}, script)
    members = server_of(job, net, report=told.append).roster.members
    assert sorted(members) == [0, 1]
    refused = [line for line in told if line.startswith("node 12 is not taken")]
    assert refused and refused[0].endswith("client 2 reports no facts")


def test_a_direction_that_curves_downwards_is_seen_at_once():
    diagonal = jnp.asarray([-1.0, 2.0])
    for size in (1.0, 1e-6):
        b = size * jnp.asarray([1.0, 0.1])
        _, convex = solve_if_convex(lambda v: diagonal * v, b, 3)
        assert not convex
        _, convex = solve_if_convex(lambda v: jnp.abs(diagonal) * v, b, 3)
        assert convex


def test_the_area_counts_a_negative_row_on_top():
    score, label = np.asarray([0.1, 0.4, 0.6, 0.9]), np.asarray([0, 1, 1, 0])
    area = _area(score, label == 1, np.ones((4, 1)))
    assert area == pytest.approx(roc_auc_score(label, score)) == 0.5


@pytest.mark.parametrize(("kind", "name"), [("bfloat16", "bfloat16"), ("float32", "")])
def test_frozen_numbers_are_coarse_below_float32(kind, name):
    frozen = {"w": jnp.ones(2, kind), "n": jnp.ones(2, "int8")}
    problem = fb.Problem(
        lambda *_: jnp.zeros(()), lambda *_: jnp.zeros(()), frozen=frozen
    )
    assert problem.coarse_type == name


def test_two_points_are_evaluated_in_every_way():
    for way in (_evaluation.WIDE_PRODUCTS, _evaluation.ACCELERATOR):
        with _evaluation.using(way):
            found = at_both(lambda w: 2 * w, jnp.ones(2), jnp.zeros(2))
        np.testing.assert_array_equal(found[0], 2 * np.ones(2))
        np.testing.assert_array_equal(found[1], np.zeros(2))


def test_one_iteration_is_enough_and_none_is_not():
    assert _given_or_least(1, None, abs) == 1
    with pytest.raises(InvalidInputError, match="iterations=0: at least 1"):
        _given_or_least(0, None, abs)


@pytest.mark.parametrize("level", [{}, {"a": np.zeros((0, 2))}, {"a": np.zeros(())}])
def test_a_client_without_rows_is_named(level):
    rows = {"a": np.ones((2, 2))}
    with pytest.raises(InvalidInputError, match="client 1 has no upper samples|differ"):
        fb.ClientData.from_clients([rows, level], [rows, rows])
    with pytest.raises(InvalidInputError, match="client 0 has no upper samples"):
        fb.ClientData.from_clients([level], [rows])


def test_the_class_of_a_row_is_the_likeliest_by_its_bound(monkeypatch):
    cleaner = FederatedCleaner()
    cleaner.classes_, cleaner.bounds_ = np.asarray(["no", "yes"]), np.asarray([1, 0.2])
    chances = np.asarray([[0.7, 0.3], [0.95, 0.05]])
    monkeypatch.setattr(FederatedCleaner, "predict_proba", lambda self, X: chances)
    assert cleaner.predict(np.zeros((2, 1))).tolist() == ["yes", "no"]


def test_an_official_test_part_stays_where_rows_are_marked_for_validation():
    label = np.zeros(6, np.int32)
    official = Dataset("t", np.ones((2, 1)), label[:2], ("a", "b"))
    marked = np.arange(6) < 3
    data = Dataset(
        "d", np.zeros((6, 1)), label, ("a", "b"), test=official, validation=marked
    )
    assert len(_rows.load(data, 0, 0, {}).test.label) == 2


@pytest.mark.parametrize(("devices", "said"), [(2, [2]), (6, [2]), (7, [7]), (1, [])])
def test_a_model_may_be_spread_over_all_devices(monkeypatch, devices, said):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    advice = _more_devices(Experiment("quadratic"))
    assert advice == [f"--model-devices {n}" for n in said]


def test_where_measuring_takes_long_clients_are_not_compared(monkeypatch):
    job = quadratic_job(BSGM, quadratic_data(3))
    monkeypatch.setattr(single.heterogeneity, "is_soon_measured", lambda job: False)
    monkeypatch.setattr(
        single.heterogeneity, "warn_where_clients_differ", lambda *_: pytest.fail()
    )
    fb.run(job.problem, job.data, (job.x, job.y), job.algorithm, rounds=1)


def test_a_safeguard_expects_the_mean_of_the_rounds_before():
    guard = Guard.of({}, {})
    assert guard.expected() == 0
    record = guard.record.seen(jnp.asarray(2.0)).seen(jnp.asarray(4.0))
    assert replace(guard, record=record).expected() == 3


def test_an_old_configuration_has_the_usual_epsilon():
    sizes = {"vocab_size": 5, "n_embd": 4, "n_head": 2, "n_layer": 1, "n_positions": 3}
    assert Config(Path("here"), sizes).gpt2().epsilon == 1e-5


@pytest.mark.parametrize(
    ("found", "taken"),
    [(1e-300, True), (9.9e11, True), (7, True)]
    + [(one, False) for one in (0, -1.0, 1e12, math.nan, math.inf, True, "1")],
)
def test_a_number_of_a_configuration_is_above_0_and_bounded(found, taken):
    held = {"base": found}
    if taken:
        assert Config(Path("here"), {}).number(held, "base") == found
    else:
        with pytest.raises(FedbilevelError, match="and no number above 0"):
            Config(Path("here"), {}).number(held, "base")


@pytest.mark.parametrize(
    ("found", "token"),
    [(0, 0), (4, 4), ([3, 1], 3)]
    + [(one, None) for one in (5, -1, 1.0, True, [], None, "1")],
)
def test_a_text_ends_with_a_token_of_the_vocabulary_or_none(found, token):
    end = Config(Path("here"), {"eos_token_id": found}).end(5)
    assert (end, type(end)) == (token, type(token))


@pytest.mark.parametrize(
    ("sites", "classes", "rows"),
    [
        ((), ("a", "b"), 64),
        ((63, 70), ("a", "b"), 70),
        ((9_999,), ("a", "b"), 9_999),
        ((10_001,), ("a", "b"), 10_000),
        ((), ("a", "b", "c", "d"), 80),
    ],
)
def test_made_up_rows_are_as_many_as_those_of_the_largest_site(sites, classes, rows):
    column = NumericColumn("age", 0.0, 1.0)
    made = _made_up(Preparation((column,), ClassLabel("ill", classes), sites))
    assert len(made.label) == len(made.features) == rows
    assert np.bincount(made.label).min() >= 15
    assert set(made.columns["group"]) == {0, 1}


def test_what_is_searched_without_ranges():
    weights = ("upper_weight", "lower_weight", "auxiliary_weight")
    found = [(one.options, one.low, one.high, one.most) for one in SEARCHED]
    assert found == [
        (("upper_step",), 0.1, 10, math.inf),
        (("lower_step", "auxiliary_step"), 0.25, 4, math.inf),
        (weights, 0.1, 10, 1),
    ]


@pytest.mark.parametrize(
    ("told", "rows"),
    [({"rows": 9, "training": 4}, 9), ({"training": 4, "validation": 2}, 6)],
)
def test_rows_of_a_site_are_those_told_or_their_sum(told, rows):
    assert _site({**told, "classes": {"a": 1}})["rows"] == rows
    assert _site({"classes": {"a": 1, "b": 2}})["rows"] == 3
