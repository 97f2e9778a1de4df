"""What a site remembers and refuses: ledgers, rows and masks, at their bounds."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedbilevel.channels import Mean, Privacy
from fedbilevel.errors import CheckpointError
from fedbilevel.federation import SiteLimits
from fedbilevel.federation import own_rows as own_rows_module
from fedbilevel.federation.ledger import SiteLedger, _digest, name_of_reply
from fedbilevel.federation.own_rows import OwnRows, rows_of_data, rows_of_files
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.layout import Announcement, context_of, question_of
from fedbilevel.federation.secure.masks import SiteKeys
from fedbilevel.federation.secure.site import SiteSecrets
from fedbilevel.federation.wire import EVERYONE, Header
from fedbilevel.runtime.privacy import IN_THE_CLEAR, Release

ASKED = Header("measure", "f", "s", "a", EVERYONE, 1, exchange=5)


def job_of(noise=0.0, delta=1e-5) -> Any:
    rows = np.arange(6, dtype=np.float32).reshape(1, 3, 2)
    return SimpleNamespace(
        channel=SimpleNamespace(
            privacy=Privacy(1.0, noise, 4, delta) if noise else None,
            reduction=Mean(),
            coders=(),
        ),
        data=SimpleNamespace(upper=rows, lower=rows, upper_sizes=[3], lower_sizes=[2]),
        every_phase=dict,
        upper_batch=None,
        lower_batch=None,
        algorithm=SimpleNamespace(sends_hessian=False),
    )


def refusal(function, *given) -> str:
    try:
        function(*given)
    except RefusedError as error:
        return str(error)
    return ""


def asked(**changes: Any) -> Header:
    return Header(**{**vars(ASKED), **changes})


# The ledger of a site.


def test_replies_end_at_the_limit_and_measurements_have_their_own():
    ledger = SiteLedger(job_of(), SiteLimits(max_exchanges=2), None)
    ledger.exchange(1, 1, "f", ["one"])
    ledger.exchange(1, 1, "f", ["one"])  # given again: it is the last one
    ledger.exchange(1, 1, "f", ["two"])
    assert refusal(ledger.exchange, 1, 1, "f", ["one"]) == (
        "limit: this site gives 2 replies, no more"
    )
    ledger.exchange(1, 1, "f", ["two"])
    assert (ledger.spent.exchanges, ledger.spent.measurements) == (2, 0)
    ledger.measure(asked(exchange=1), b"")
    ledger.measure(asked(exchange=2), b"")
    told = "limit: this site measures 2 times, no more"
    assert refusal(ledger.measure, asked(exchange=3), b"") == told
    assert refusal(ledger.conclude, asked(), b"") == told
    assert (ledger.spent.exchanges, ledger.spent.measurements) == (2, 2)
    assert ledger.spent.releases == {IN_THE_CLEAR: 4}
    assert ledger.spent.concluded == {}


def test_the_words_of_an_answer_are_kept_apart():
    """Two answers are the same only if all their names are, in their order."""
    ledger = SiteLedger(job_of(), SiteLimits(), None)
    for given in (["a", "b"], ["ab"], ["b", "a"], ["a", "b"]):
        ledger.exchange(1, 1, "f", given)
    assert ledger.spent.exchanges == 4
    ledger.exchange(1, 1, "g", ["a", "b"])  # of another federation
    assert ledger.spent.exchanges == 5 and sorted(ledger.spent.given) == ["f", "g"]


def test_a_site_measures_once_after_each_exchange_of_each_start():
    ledger = SiteLedger(job_of(), SiteLimits(), None)
    ledger.measure(asked(exchange=5), b"point")
    ledger.measure(asked(exchange=5), b"point")  # the answer was lost
    for again in ({"exchange": 5}, {"exchange": 4}, {"attempt": 0, "exchange": 9}):
        told = refusal(ledger.measure, asked(**again), b"another")
        assert told == (
            f"measured: after exchange {again['exchange']}, at another point"
        )
    # Its own blocks are another point, too.
    assert refusal(ledger.measure, asked(accepted=1), b"point").startswith("measured")
    assert ledger.spent.measurements == 1
    ledger.measure(asked(exchange=6), b"another")
    ledger.measure(asked(attempt=2, exchange=1), b"another")
    ledger.measure(asked(federation="g", exchange=1), b"another")
    assert ledger.spent.measurements == 4
    assert ledger.spent.measured == {
        "f": [2, 1, _digest(asked(), b"another")],
        "g": [1, 1, _digest(asked(), b"another")],
    }
    assert _digest(asked(accepted=1), b"") != _digest(asked(), b"")


def test_a_federation_is_concluded_once():
    ledger = SiteLedger(job_of(), SiteLimits(), None)
    for _ in range(2):
        ledger.conclude(asked(), b"point")
    told = "measured: this federation was concluded before"
    assert refusal(ledger.conclude, asked(), b"another") == told
    ledger.conclude(asked(federation="g"), b"another")
    assert ledger.spent.measurements == 2 and len(ledger.spent.concluded) == 2


def test_where_nothing_is_measured_nothing_is_counted():
    ledger = SiteLedger(job_of(), SiteLimits("none"), None)
    told = "measure: this site does not measure for others"
    assert refusal(ledger.measure, asked(), b"") == told
    assert refusal(ledger.conclude, asked(), b"") == told
    assert ledger.spent.measurements == 0


def test_a_reply_is_given_up_to_the_epsilon_of_the_site():
    """Of noise 8 over 4 sites one reply has a multiplier of 4: epsilon .9263."""
    kind = Release(8.0, 4, 1, 1, 1e-5)
    ledger = SiteLedger(job_of(8.0), SiteLimits(max_epsilon=1.0), None)
    ledger.exchange(1, 1, "f", ["one"])
    told = "privacy: one more reply would exceed the epsilon of this site"
    assert refusal(ledger.exchange, 1, 1, "f", ["two"]) == told
    assert ledger.spent.releases == {kind: 1} and ledger.spent.exchanges == 1
    assert ledger.remark() == (
        "rows of this site were released 1 time before, with an epsilon of 0.9263 at "
        "delta 1e-05"
    )
    free = SiteLedger(job_of(8.0), SiteLimits(), None)
    assert free.remark() == ""
    for name in ("one", "two"):
        free.exchange(1, 1, "f", [name])
    assert free.spent.releases == {kind: 2}
    clear = SiteLedger(job_of(), SiteLimits(), None)
    clear.exchange(1, 1, "f", ["one"])
    assert clear.remark() == ""  # without noise there is no epsilon to speak of


def test_a_ledger_is_written_before_an_answer_leaves_and_read_by_the_next(tmp_path):
    limits = SiteLimits(max_exchanges=2)
    first = SiteLedger(job_of(), limits, tmp_path)
    assert first.rows is not None
    path = first.rows.path
    assert not path.exists()
    first.exchange(1, 1, "f", ["one"])
    assert json.loads(path.read_text())["exchanges"] == 1
    other = SiteLedger(job_of(), limits, tmp_path)
    other.exchange(1, 1, "f", ["one"])  # the same answer
    other.exchange(1, 1, "f", ["two"])
    held = path.read_text()
    assert refusal(first.exchange, 1, 1, "f", ["three"]).startswith("limit")
    assert path.read_text() == held and json.loads(held)["exchanges"] == 2


def test_earlier_ledgers_are_named_to_the_operator(tmp_path):
    (tmp_path / "client-0.ledger.json").write_text(
        '{"exchanges": 3, "measurements": 0, "measured": {}, "concluded": {}}'
    )
    ledger = SiteLedger(job_of(8.0), SiteLimits(), tmp_path)
    assert ledger.remark() == (
        "rows of this site were released 3 times before, with an epsilon of inf at "
        "delta 1e-05: some of them without noise. client-0.ledger.json, of an earlier "
        "version, has not noted any noise, and counts as without. If it is about other "
        "rows, move it away"
    )


def test_a_reply_is_named_by_all_that_it_depends_on():
    header = asked(kind="exchange", stage=1, phase=2, index=3, info={"number": 1})
    name = name_of_reply(header, ["x"], masked=False)
    assert len(name) == 64
    changes = ("federation", "algorithm", "stage", "phase", "index", "accepted")
    for field in changes:
        value = getattr(header, field)
        other = "o" if isinstance(value, str) else value + 1
        changed = Header(**{**vars(header), field: other})
        assert name_of_reply(changed, ["x"], masked=False) != name
    assert name_of_reply(header, ["y"], masked=False) != name
    # Which sum it is in matters under masks alone; request numbers never do.
    other = Header(**{**vars(header), "info": {"number": 2}, "number": 9})
    assert name_of_reply(other, ["x"], masked=False) == name
    masked = name_of_reply(header, ["x"], masked=True)
    assert masked not in (name, name_of_reply(other, ["x"], masked=True))


# By which rows a ledger is known.


def test_rows_of_a_job_are_those_of_both_levels():
    data = job_of().data
    rows = [np.asarray(one, np.float32).tobytes() for one in ([0, 1], [2, 3], [4, 5])]
    assert list(rows_of_data(data)) == [*rows, *rows[:2]]
    data.upper = {"a": data.upper.astype(np.float64), "b": np.asarray([[7, 8, 9]])}
    found = next(iter(rows_of_data(data)))
    assert found == rows[0] + np.asarray([7]).tobytes()  # whole numbers as they are


def test_rows_of_a_job_are_read_in_pieces(monkeypatch):
    whole = list(rows_of_data(job_of().data))
    for size in (1, 2, 3):
        monkeypatch.setattr(own_rows_module, "_CHUNK", size)
        assert list(rows_of_data(job_of().data)) == whole
        monkeypatch.setattr(own_rows_module, "_AT_ONCE", size)
        names = own_rows_module._names(bytes(32), whole)
        assert len(names) == 3 and names.tolist() == sorted(names)


def test_lines_of_a_table_are_rows_but_for_its_head(tmp_path):
    for name, rows in (
        ("a.csv", [b"1,2", b"3,4"]),
        ("a.tsv", [b"1,2", b"3,4"]),
        ("a.csv.txt", [b"1,2", b"3,4"]),
        ("a.txt", [b"x,y", b"1,2", b"3,4"]),
    ):
        (tmp_path / name).write_bytes(b"x,y\n1,2\n\n  3,4 \r\n")
        assert list(rows_of_files(tmp_path / name)) == rows
    (tmp_path / "b.bin").write_bytes(b"\0one\ntwo")
    assert [len(one) for one in rows_of_files(tmp_path / "b.bin")] == [32]


def test_a_long_line_is_several_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(own_rows_module, "_LONGEST", 4)
    (tmp_path / "a.txt").write_bytes(b"abcdef\ngh\n")
    assert list(rows_of_files(tmp_path / "a.txt")) == [b"abcd", b"ef", b"gh"]


def test_without_its_key_no_ledger_is_known(tmp_path):
    first = OwnRows(tmp_path, [b"one"])
    assert (len(first.key), len(first.secret)) == (32, 64)
    assert OwnRows(tmp_path, [b"one"]).path == first.path
    assert OwnRows(tmp_path, [b"two"]).path != first.path
    (tmp_path / "ledger.key").write_bytes(bytes(31))
    with pytest.raises(CheckpointError, match="is damaged or gone"):
        OwnRows(tmp_path, [b"one"])
    (tmp_path / "ledger.key").unlink()
    with pytest.raises(CheckpointError, match="is damaged or gone"):
        OwnRows(tmp_path, [b"one"])


# Masks: what a site remembers.

KEYS = [SiteKeys.from_bytes(bytes([k + 1] * 32)) for k in range(3)]


def announced(secrets, number, members=(0, 1, 2), repeat=0) -> dict[str, Any]:
    public = {k: KEYS[k].public_bytes for k in members}
    public[0] = secrets.keys.public_bytes
    return {
        "number": number,
        "participants": list(members),
        "keys": {str(k): key.hex() for k, key in public.items()},
        "signatures": {},
        "repeat": repeat,
    }


def masked(secrets, number, about="one"):
    info = announced(secrets, number)
    reply = (np.zeros(2, np.float32),)
    return secrets.mask(info, b"c", Question("s", about), reply, 1.0, None)


def test_a_site_remembers_eight_answers_over_restarts(tmp_path):
    first = SiteSecrets("f", 0, tmp_path, Cohorts(2))
    assert first.introduction() == {
        "key": first.keys.public_bytes.hex(),
        "minimum": 2,
    }
    path = tmp_path / "f.keys.json"
    assert path.stat().st_mode & 0o777 == 0o600
    for number in range(1, 10):
        masked(first, number, str(number))
    assert sorted(first.site.records) == list(range(2, 10))
    again = SiteSecrets("f", 0, tmp_path, Cohorts(2))
    assert again.keys.private_bytes == first.keys.private_bytes
    assert again.site.records == first.site.records
    info = {**announced(again, 9), "survivors": [0, 1]}
    tags = again.confirm(info)
    np.testing.assert_array_equal(first.confirm(info), tags)
    third = SiteSecrets("f", 0, tmp_path, Cohorts(2))
    assert (
        third.site.records[9].survivors == (0, 1)
        and third.site.records[8].survivors == ()
    )
    assert refusal(third.confirm, {**info, "survivors": [0, 1, 2]}).startswith("mask")
    told = refusal(third.confirm, {**announced(third, 1), "survivors": [0, 1]})
    assert told == "mask: exchange 1: this site sent no reply to it, or forgot it"
    assert refusal(masked, third, 9).startswith("mask: client 0, exchange 9: a reply")
    assert SiteSecrets("g", 0, tmp_path, Cohorts(2)).site.records == {}


def test_an_answered_question_is_confirmed_in_one_sum():
    secrets = SiteSecrets("f", 0, None, Cohorts(2))
    for number in (1, 2):
        masked(secrets, number)
    secrets.confirm({**announced(secrets, 1), "survivors": [0, 1]})
    told = refusal(secrets.confirm, {**announced(secrets, 2), "survivors": [0, 2]})
    assert told.startswith("cohort: client 0, exchange 2: it was answered in a sum")
    assert secrets.site.records[2].survivors == ()


@pytest.mark.parametrize("survivors", [None, "01", [True, 1], [0, 1.0], {0: 1}])
def test_a_sum_is_named_by_whole_numbers(survivors):
    secrets = SiteSecrets("f", 0, None, Cohorts(2))
    masked(secrets, 1)
    told = refusal(secrets.confirm, {**announced(secrets, 1), "survivors": survivors})
    assert told == "announcement: does not name the set in the sum"


def test_keys_are_signed_and_checked_where_there_is_an_identity():
    seen: list[Any] = []
    identity: Any = SimpleNamespace(
        sign=lambda *given: seen.append(given) or b"\x01\x02",
        check=lambda *given: seen.append(given),
    )
    secrets = SiteSecrets("f", 0, None, Cohorts(3), identity)
    sent = secrets.introduction()
    assert (sent["signature"], sent["minimum"]) == ("0102", 3)
    assert seen == [("f", 0, secrets.keys.public_bytes)]
    info = {**announced(secrets, 1), "signatures": {"1": "ff"}}
    secrets.mask(info, b"", Question("s", "q"), (np.zeros(1),), 1.0, None)
    keys = {k: bytes.fromhex(info["keys"][str(k)]) for k in range(3)}
    assert seen[1:] == [("f", keys, {1: b"\xff"})]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"repeat": 2**16 - 1}, True),
        ({"repeat": 2**16}, False),
        ({"repeat": -1}, False),
        ({"repeat": True}, False),
        ({"number": 0}, True),
        ({"number": -1}, False),
        ({"number": 2**64}, False),
        ({"number": 1.0}, False),
        ({"participants": [0, 1]}, False),  # keys of others than these
        ({"participants": [0, 1, 2, 3]}, False),
        ({"participants": [0, 1, True]}, False),
        ({"keys": {"0": "zz", "1": "", "2": ""}}, False),
        ({"signatures": {"0": "z"}}, False),
        ({"signatures": {"0": "ff"}}, True),
        ({"more": 1}, False),
    ],
)
def test_what_can_be_announced(change, taken):
    secrets = SiteSecrets("f", 0, None, Cohorts(2))
    told = refusal(Announcement.read, {**announced(secrets, 1), **change})
    assert told.startswith("announcement: cannot be read") is not taken


def test_the_largest_client_is_one_below_everyone():
    for client, taken in ((EVERYONE - 1, True), (EVERYONE, False)):
        keys = {"0": "", str(client): ""}
        info = {"number": 1, "participants": [0, client], "keys": keys}
        assert bool(refusal(Announcement.read, {**info, "signatures": {}})) is not taken


def test_what_a_sum_is_about_has_all_that_is_the_same_for_all():
    header = asked(kind="exchange", stage=1, phase=2, index=3, info={"repeat": 1})
    contexts, questions = {context_of(header, ["x"])}, {question_of(header, ["x"])}
    for change in ({"stage": 2}, {"phase": 3}, {"index": 4}, {"info": {"repeat": 2}}):
        other = Header(**{**vars(header), **change})
        contexts.add(context_of(other, ["x"]))
        questions.add(question_of(other, ["x"]))
    assert len(contexts) == len(questions) == 5
    # The number of an exchange is no part of the question.
    other = asked(kind="exchange", stage=1, phase=2, index=3, exchange=6)
    once = Header(**{**vars(header), "info": {"repeat": 0}})
    assert question_of(other, ["x"]) == question_of(
        Header(**{**vars(once), "exchange": 9}), ["x"]
    )
    assert context_of(other, ["x"]) != context_of(once, ["x"])
    assert question_of(asked(settings="o"), []) != question_of(asked(), [])
    assert question_of(asked(), ["a", "b"]) != question_of(asked(), ["ab"])
