"""What a server that lies, or a node, wanted to know or to stop, and does not."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from fedbilevel import FedBiO, OfCurvature, OfDistance, SteadySteps
from fedbilevel.errors import FedbilevelError
from fedbilevel.experiments.clients import read_channel
from fedbilevel.federation import SiteLimits
from fedbilevel.federation.refusals import REASONS
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.server import MaskedServer
from fedbilevel.federation.server import exchanges as exchanges_module
from fedbilevel.federation.wire import unpack
from fedbilevel.runtime import Checkpoints, SimulatorRuntime, execute
from tests.cases import quadratic_data, quadratic_job
from tests.federation import FEDERATION, Loopback, of_all_rows, server_of, site_of
from tests.tampering import kind_of
from tests.test_federation import BSGM, assert_close
from tests.test_hostile_packets import lying
from tests.test_lying_server import changed, last_of

COUNT = 4


def masked_job(change=lambda rows: rows, **more):
    """Return a job under masks; `change` makes other rows of its rows, after checks."""
    channel = read_channel(aggregate="secure")
    job = quadratic_job(BSGM, quadratic_data(COUNT), channel=channel)
    rows = change((job.data.upper, job.data.lower))
    data = replace(job.data, upper=rows[0], lower=rows[1])
    return replace(job, data=data, **more)


def net_of(job, folder=None, **more) -> Loopback:
    net = Loopback({})
    more = {"holds": False, "report": net.told.append, **more}
    for k in range(job.clients):
        place = None if folder is None else folder / str(k)
        net.sites[10 + k] = site_of(job, k, place, **more)
    return net


def answer_of(site, packet):
    header, listed, body = unpack(site.handle(packet), 1 << 30)
    return header, listed, bytes(body)


def numbered(packet: bytes, count: int, **info) -> bytes:
    """Return a request under a new number, with the same or another announcement."""

    def later(header, leaves):
        number = header.info["number"] + count
        said = {**header.info, **info, "number": number}
        said["keys"] = {str(k): said["keys"][str(k)] for k in said["participants"]}
        return replace(header, number=header.number + 50 + count, info=said), leaves

    return changed(packet, later)


def with_key(key):
    """Return a change of a request, in which client 0 has another key."""

    def change(header, leaves):
        keys = {**header.info["keys"], "0": key}
        return replace(header, info={**header.info, "keys": keys}), leaves

    return change


# To read rows in what is said in the clear


FAR = [0.0, 1e3, 1e12, -1e12, 1e30, 3e38]


def other_rows(rows):
    """Return other and much larger rows in the same shapes."""
    return jax.tree.map(lambda leaf: leaf * 1e6 + 3, rows)


@pytest.mark.slow
def test_what_a_site_says_at_any_point_depends_on_no_row():
    """The text of a refusal, and whether there was one, told rows to nine digits."""
    heard = []
    honest = masked_job()
    first = net_of(honest)
    execute(server_of(honest, first), 1)
    packets = [last_of(first, 10, kind) for kind in ("hello", "exchange")]
    for change in (lambda rows: rows, other_rows):
        job, said = masked_job(change), []
        site = site_of(job, 0, limits=SiteLimits(largest_point=1e300))
        assert answer_of(site, packets[0])[0].kind == "hello"
        # Its keys are not those that were announced then.
        key = site._secrets_of(FEDERATION).keys.public_bytes.hex()
        packet = changed(packets[1], with_key(key))
        for count, value in enumerate(FAR, 1):
            asked = changed(
                numbered(packet, count),
                lambda header, leaves, value=value: (
                    header,
                    [np.full_like(leaf, value) for leaf in leaves],
                ),
            )
            header, listed, body = answer_of(site, asked)
            assert header.kind == "exchange", value
            # What is not masked is about keys, which are drawn anew.
            said.append((replace(header, info=None), listed, len(body)))
        heard.append(said)
    assert heard[0] == heard[1]


def test_no_request_chooses_the_range_of_masks(tmp_path):
    job = masked_job()
    net = net_of(job)
    execute(server_of(job, net), 1)
    packet = last_of(net, 10, "exchange")
    header, _, _ = answer_of(net.sites[10], numbered(packet, 1, largest=1e-9))
    assert (header.kind, header.info) == ("refused", {"reason": "announcement"})


def test_a_site_does_not_work_far_out():
    job = masked_job()
    net = net_of(job)
    execute(server_of(job, net), 1)
    far = changed(
        numbered(last_of(net, 10, "exchange"), 1),
        lambda header, leaves: (header, [leaf - 1e9 for leaf in leaves]),
    )
    header, _, body = answer_of(net.sites[10], far)
    assert (header.kind, header.info, body) == ("refused", {"reason": "point"}, b"")
    assert "beyond 1e+08" in net.told[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("curvature", 1e-30), ("curvature", -1), ("halvings", -99), ("stride", 1e30)],
)
def test_no_number_that_scales_steps_leads_far_out(name, value):
    """L1 = 1e-30 made local steps of 5e29, from a point that was near."""
    channel = read_channel(aggregate="secure")
    steps = OfDistance(1.0), OfCurvature(0.5), OfCurvature(0.5)
    method = SteadySteps(FedBiO(*steps, local_steps=2))
    job = quadratic_job(method, quadratic_data(COUNT), channel=channel)
    net = net_of(job)
    execute(server_of(job, net), 1)
    shapes = net.sites[10].work.sent[0, 0]
    names = [
        getattr(path[-1], "name", "")
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    packet, place = numbered(last_of(net, 10, "exchange"), 1), names.index(name)

    def scaled(header, leaves):
        leaves[place] = np.full_like(leaves[place], value)
        return header, leaves

    header, _, _ = answer_of(net.sites[10], changed(packet, scaled))
    assert (header.kind, header.info) == ("refused", {"reason": "point"})
    assert name in net.told[-1]
    header, _, _ = answer_of(net.sites[10], numbered(packet, 2))
    assert header.kind == "exchange"


def test_a_site_measures_nothing_far_out():
    job = quadratic_job(BSGM, quadratic_data(2))
    net = net_of(job)
    execute(server_of(job, net), 1)
    packet = last_of(net, 10, "measure")

    def at(distance):
        def moved(header, leaves):
            header = replace(header, number=header.number + 50)
            return header, [leaf - distance for leaf in leaves]

        header, _, _ = answer_of(net.sites[10], changed(packet, moved))
        return (header.info or {})["reason"]

    assert at(1e9) == "point"
    assert at(1.0) == "measured"  # at another point, after the same exchange


def test_every_refusal_is_a_name_of_the_list(tmp_path):
    job = masked_job()
    net = net_of(job, tmp_path)
    execute(server_of(job, net), 1)
    for kind in ("exchange", "agree", "reveal"):
        packet = last_of(net, 10, kind)
        for place in range(0, len(packet), 7):
            wrong = packet[:place] + bytes([packet[place] ^ 1]) + packet[place + 1 :]
            header, listed, body = answer_of(net.sites[10], wrong)
            assert header.kind == "refused" and not listed and not body
            assert set(header.info or {}) == {"reason"}
            assert (header.info or {})["reason"] in REASONS


@pytest.mark.slow
@pytest.mark.parametrize("many", [1, COUNT])
def test_replies_that_are_not_finite_are_summed_and_the_run_says_so(many):
    """Under masks nobody sees whose they are; the sites' own terminals say it."""
    nothing = lambda leaf: leaf.at[:many].set(np.nan)  # noqa: E731
    job = masked_job(lambda rows: jax.tree.map(nothing, rows))
    net = net_of(job)
    said: list[str] = []
    with pytest.raises(FedbilevelError, match="3 sums in a row could not be opened"):
        execute(server_of(job, net, report=said.append), 1)
    assert any(
        f"{many} of {COUNT} replies hold numbers that are not" in s for s in said
    )
    assert sum("holds NaN or infinity, which counts as 0" in s for s in net.told)
    refused = [
        answer for _, _, answer in net.sent if b'"kind":"refused"' in (answer or b"")
    ]
    assert refused == []


def test_a_reply_that_is_not_finite_is_answered_under_noise():
    """A refusal has no noise: it would say of rows what epsilon does not count."""
    channel = read_channel(clip=1.0, noise=2.0)
    job = quadratic_job(BSGM, quadratic_data(COUNT), channel=channel)
    nothing = lambda leaf: leaf.at[:1].set(np.nan)  # noqa: E731
    rows = jax.tree.map(nothing, (job.data.upper, job.data.lower))
    job = replace(job, data=replace(job.data, upper=rows[0], lower=rows[1]))
    net = net_of(job)
    end = execute(server_of(job, net), 2)
    assert (end.state.attendance == 1).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(end.state.server))
    assert any("which counts as 0" in line for line in net.told)


# To open a reply by two sums


def fewer(packet, count, **more):
    return numbered(packet, count, participants=[0, 1, 2], **more)


def sum_over(net, members, packet, count, **more):
    """Ask some sites for a sum; return what they answer to its steps."""
    kinds, asked = [], numbered(packet, count, participants=members, **more)
    for client in members:
        header, _, _ = answer_of(net.sites[10 + client], asked)
        kinds.append((header.kind, (header.info or {}).get("reason")))

    def agree(header, leaves):
        info = {**header.info, "survivors": members}
        return replace(header, kind="agree", number=header.number + 1, info=info), []

    for client in members:
        header, _, _ = answer_of(net.sites[10 + client], changed(asked, agree))
        kinds.append((header.kind, (header.info or {}).get("reason")))
    return kinds


ANSWERED = [("exchange", None)] * 3
REFUSED = [("refused", "cohort")] * 3


@pytest.mark.parametrize("again", ["at once", "restarted", "another federation"])
def test_the_same_question_is_answered_in_one_sum(tmp_path, again):
    """{0, 1, 2, 3} and then {0, 1, 2}: the difference is the reply of site 3."""
    job = masked_job()
    net = net_of(job, tmp_path)
    execute(server_of(job, net), 1)
    packet = last_of(net, 10, "exchange")
    if again == "restarted":
        net = replace(net_of(job, tmp_path), sent=net.sent)
    if again == "another federation":
        net = renamed(job, tmp_path)
        packet = last_of(net, 10, "exchange")
    assert sum_over(net, [0, 1, 2], packet, 1) == ANSWERED + REFUSED
    # In a sum over the same sites it is answered again: a server may have lost it.
    same = sum_over(net, [0, 1, 2, 3], packet, 2)
    assert [kind for kind, _ in same] == ["exchange"] * 4 + ["agree"] * 4


def renamed(job, folder):
    """Return sites with what they remember, in a federation of another name."""
    net = net_of(job, folder)
    for site in net.sites.values():
        for name in ("npz", "keys.json"):
            Path(str(site.folder), f"{FEDERATION}.{name}").unlink()
    execute(server_of(job, net), 1)
    return net


def test_another_repeat_is_of_other_rows():
    job = masked_job()
    net = net_of(job)
    execute(server_of(job, net), 1)
    packet = last_of(net, 10, "exchange")
    site, drawn = net.sites[10], []
    for repeat in (0, 1, 2, 1):
        header = unpack(numbered(packet, 1, repeat=repeat), 1 << 30)[0]
        turn = site._draws.turn(job, header, [])
        drawn.append(jax.random.key_data(turn.key).tolist())
    assert drawn[0] != drawn[1] != drawn[2] and drawn[1] == drawn[3]
    kinds = [kind for kind, _ in sum_over(net, [0, 1, 2], packet, 1, repeat=1)]
    assert kinds == ["exchange"] * 3 + ["agree"] * 3


def test_replies_of_all_rows_are_summed_over_cohorts_apart():
    """Without batches a point nearby has the same answer, so that sums may not differ
    by one site, whatever is asked."""
    job = masked_job(upper_batch=None, lower_batch=None)
    net = net_of(job)
    execute(server_of(job, net), 1)
    packet = last_of(net, 10, "exchange")

    def nearby(header, leaves):
        return header, [leaf + 1e-9 for leaf in leaves]

    moved = changed(packet, nearby)
    assert sum_over(net, [0, 1, 2], moved, 1) == ANSWERED + REFUSED
    kinds = [kind for kind, _ in sum_over(net, [0, 1], moved, 2)]
    assert kinds == ["exchange"] * 2 + ["refused"] * 2
    any_of_them = net_of(job, limits=SiteLimits(cohorts="any"))
    execute(server_of(job, any_of_them), 1)
    moved = changed(last_of(any_of_them, 10, "exchange"), nearby)
    kinds = [kind for kind, _ in sum_over(any_of_them, [0, 1, 2], moved, 1)]
    assert kinds == ["exchange"] * 3 + ["agree"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("away", [range(1, 4), range(9, 13)], ids=["first", "later"])
def test_a_run_keeps_to_its_cohort_where_cohorts_are_apart(away):
    """Whoever was missing at first stays out; whoever goes away later is waited for."""
    job = masked_job(upper_batch=None, lower_batch=None)
    net, asked, said = net_of(job), [], []

    def script(node, packet, net):
        if node == 13 and unpack(packet, 1 << 30)[0].kind != "hello":
            asked.append(node)
            if len(asked) in away:
                return None
        return net.sites[node].handle(packet)

    net.script = script
    end = execute(server_of(job, net, report=said.append), 4)
    record = end.state.attendance > 0
    assert (record == record[0]).all()
    assert any("keep the sites of their sums apart" in line for line in said)


@pytest.mark.slow
def test_another_server_goes_on_with_the_cohort_of_the_first(tmp_path):
    """A site that was away comes back, and the sites in the sums refuse it."""
    job, keep = of_all_rows(masked_job()), Checkpoints(tmp_path, every_rounds=1)
    net = net_of(job)
    away = net.sites.pop(13)
    execute(server_of(job, net), 2, checkpoints=keep)
    net.sites[13] = away
    end = execute(server_of(job, net, attempt=2), 4, checkpoints=keep)
    assert (end.state.attendance[:, 3] == 0).all()
    assert (end.state.attendance[:, :3] > 0).all() and len(end.state.attendance) >= 4


def test_no_part_of_a_drawn_cohort_is_taken_for_all_of_it(monkeypatch):
    """Sites of the last sum that are not asked now were in it all the same."""
    job, taken = replace(masked_job(), participants=3), []
    monkeypatch.setattr(
        MaskedServer, "goes_on", lambda _, clients: taken.append(clients)
    )
    end = execute(server_of(job, net_of(job)), 6)
    whole = [set(np.flatnonzero(row)) for row in end.state.attendance > 0]
    assert taken and all(one in whole for one in taken)


def test_two_processes_on_one_folder_are_in_one_sum(tmp_path):
    path, question = tmp_path / "cohorts.jsonl", Question("s", "a")
    for apart, other in ((False, question), (True, Question("t", "b"))):
        one, two = Cohorts(2, apart, path), Cohorts(2, apart, path)
        assert one.enter(question, (0, 1, 2)) is None
        assert two.enter(other, (0, 1)) is not None
        assert two.enter(other, (0, 1, 2)) is None
        assert one.enter(other, (0, 1, 2)) is None
        path.unlink()
        assert one.enter(other, (0, 1)) is not None  # what this process knows, it knows


def test_sums_that_were_not_kept_apart_bind_nobody(tmp_path):
    """Of batches, for which other questions are answered from other rows."""
    path = tmp_path / "cohorts.jsonl"
    batches = Cohorts(2, False, path)
    for number, members in enumerate([(0, 1, 2), (0, 1)]):
        assert batches.enter(Question("s", str(number)), members) is None
    assert Cohorts(2, True, path).enter(Question("s", "c"), (0, 2)) is None
    assert Cohorts(2, True, path).enter(Question("s", "d"), (0, 1)) is not None
    # An earlier version did not note it, and allowed several.
    path.write_text('["s", "a", [0, 1]]\n')
    refused = Cohorts(2, True, path).enter(Question("s", "b"), (0, 2))
    assert refused and "earlier version" not in refused
    path.write_text('["s", "a", [0, 1]]\n["s", "b", [2, 3]]\n')
    refused = Cohorts(2, True, path).enter(Question("s", "c"), (0, 1))
    assert refused and f"{path} has several sets of clients" in refused


def test_what_is_remembered_of_sums_is_not_forgotten_when_it_is_damaged(tmp_path):
    job = masked_job()
    execute(server_of(job, net_of(job, tmp_path)), 1)
    path = tmp_path / "0" / "cohorts.jsonl"
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    assert all(json.loads(line)[2] == [0, 1, 2, 3] for line in whole.splitlines())
    path.write_bytes(whole + b'["cut')  # by a crash, before anything was answered
    site = site_of(job, 0, tmp_path / "0")
    assert len(site._cohorts.sums) == len(whole.splitlines())
    assert path.read_bytes() == whole
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(FedbilevelError, match="damaged .*Put back a copy, or move it"):
        _ = site_of(job, 0, tmp_path / "0")._cohorts


# To stop a run


def test_one_node_does_not_keep_a_run_from_ending():
    """krum:1 of five needs all five replies, and one of them is never a number."""
    channel = read_channel(aggregate="krum:1")
    job = quadratic_job(BSGM, quadratic_data(5), channel=channel)

    def spoiled(answer):
        return changed(
            answer, lambda header, leaves: (header, [leaf * np.nan for leaf in leaves])
        )

    net = Loopback(
        {10 + k: site_of(job, k) for k in range(5)}, lying(13, "exchange", spoiled)
    )
    with pytest.raises(FedbilevelError, match=r"clients \[3\] were refused 10 times"):
        execute(server_of(job, net), 2)


@pytest.mark.slow
@pytest.mark.parametrize("liars", [[3], [2, 3]], ids=["one", "two in turn"])
def test_a_run_goes_on_without_a_node_that_it_does_not_need(liars):
    """krum:1 of six needs five replies, and one of the six is never a number."""
    channel = read_channel(aggregate="krum:1")
    job = quadratic_job(BSGM, quadratic_data(6), channel=channel)
    named, spoiled = [], []

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        exchange = unpack(packet, 1 << 30)[0].exchange
        liar = liars[exchange % len(liars)]
        if kind_of(packet) != "exchange" or node != 10 + liar:
            return answer
        spoiled.append((exchange, liar, "not-finite"))
        return changed(
            answer, lambda header, leaves: (header, [leaf * np.nan for leaf in leaves])
        )

    net = Loopback({10 + k: site_of(job, k) for k in range(6)}, script)
    deployed = execute(server_of(job, net, left_out=named.append), 4)
    found = [(one["exchange"], one["client"], one["reason"]) for one in named]
    assert found == spoiled and len(spoiled) >= 4
    record = deployed.state.attendance
    replayed = execute(SimulatorRuntime(job.replaying(record)), 4)
    assert_close(deployed.state.server, replayed.state.server, 1e-11)


def test_two_nodes_in_turn_do_not_keep_a_run_from_ending(monkeypatch):
    monkeypatch.setattr(exchanges_module, "_PAUSE", 0.0)
    channel = read_channel(aggregate="krum:1")
    job = quadratic_job(BSGM, quadratic_data(5), channel=channel)
    asked = []

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        if b'"kind":"exchange"' not in packet:
            return answer
        asked.append(node)
        if node != 12 + asked.count(10) % 2:
            return answer
        spoil = lambda header, leaves: (header, [leaf * np.nan for leaf in leaves])  # noqa: E731
        return changed(answer, spoil)

    net = Loopback({10 + k: site_of(job, k) for k in range(5)}, script)
    with pytest.raises(
        FedbilevelError, match=r"clients \[2, 3\] were refused 30 times"
    ):
        execute(server_of(job, net), 2)
