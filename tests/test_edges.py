"""Small rules that a mistake drawn at random had got by, one test for each."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.channels import Privacy
from fedbilevel.channels.coders import Levels, Quantize
from fedbilevel.errors import CheckpointError
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
        one.note(Question("s", "a"), (0, 1, 2))
    assert any_of_them.why_not(Question("s", "b"), (0, 1)) is None
    assert apart.why_not(Question("s", "b"), (0, 1)) is not None
    assert apart.why_not(Question("s", "b"), (0, 1, 2)) is None
    assert apart.why_not(Question("s", "b"), (3, 4)) is None
    assert apart.why_not(Question("t", "b"), (0, 1)) is None


@pytest.mark.parametrize("flag", ["holds", "concludes"])
def test_a_hello_whose_flags_are_none_is_not_taken(flag):
    job, told = quadratic_job(BSGM, quadratic_data(3)), []
    script = lying(12, "hello", lambda answer: with_info(answer, **{flag: "yes"}))
    net = Loopback({10 + k: site_of(job, k) for k in range(3)}, script)
    members = server_of(job, net, report=told.append).roster.members
    assert sorted(members) == [0, 1]
    refused = [line for line in told if line.startswith("node 12 is not taken")]
    assert refused and refused[0].endswith("client 2 reports no facts")
