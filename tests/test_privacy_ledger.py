"""What was released of rows counts for them, whatever federation it was in."""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from benchmarks import soak

from fedbilevel.errors import CheckpointError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Site, SiteLimits
from fedbilevel.federation.ledger import SiteLedger
from fedbilevel.federation.own_rows import rows_of_files
from fedbilevel.federation.server import exchanges as exchanges_module
from fedbilevel.federation.wire import RefusedError, pack, unpack, unpack_start
from fedbilevel.runtime import Job, Ledger, execute
from fedbilevel.runtime.privacy import (
    epsilon_of,
    privacy_of_releases,
    privacy_spent,
    release_of,
)
from tests import federation as own_federation
from tests.federation import TERMS, Loopback, server_of, site_job, site_of
from tests.tampering import renewed, with_header
from tests.test_channels import DELTA, direct_epsilon
from tests.test_site_limits import (
    MASKED,
    NOISY,
    PLAIN,
    an_exchange,
    asked_for,
    federation,
    job_with,
    told,
)

QUIET = {"clip": 0.1, "noise": 1.0, "delta": DELTA}
LOUD = {"clip": 0.1, "noise": 30.0, "delta": DELTA}
FEW = SiteLimits(max_epsilon=8.0)


def again(job, folder, rounds):
    """Run another federation, after a first one, over the same state folders."""
    net = Loopback({10 + k: site_of(job, k, folder / str(k)) for k in range(3)})
    execute(server_of(job, net, attempt=2), rounds)


def reply_of(job, folder, limits=FEW):
    """Ask client 0, started anew, for a reply as no federation did before."""
    net, _ = federation(job)
    site = site_of(job, 0, folder, limits=limits)
    told(site, net.sent[0][1])  # hello
    return told(site, an_exchange(net))


def refuses(job, folder, limits=FEW, reply="a", blocks=1):
    """Say why a site with these rows gives no reply, if so."""
    try:
        SiteLedger(job, limits, folder).exchange(blocks, 3, "f3", [reply])
    except RefusedError as error:
        return error.reason
    return ""


@pytest.mark.slow
def test_replies_are_priced_at_the_noise_that_they_had(tmp_path):
    """40 replies at noise 1 are an epsilon of more than 100, whatever comes then."""
    federation(job_with(QUIET), 40, folder=tmp_path)
    assert reply_of(job_with(LOUD), tmp_path / "0") == "privacy"
    # Rows of which nothing was released.
    assert isinstance(reply_of(job_with(LOUD), tmp_path / "fresh"), int)


def test_another_number_of_the_client_has_the_same_ledger(tmp_path):
    """Client 1 comes with the rows and the state folder that were client 0's."""
    job, limits = job_with(PLAIN), SiteLimits(max_exchanges=3)
    federation(job, 3, folder=tmp_path)
    net, _ = federation(job)
    (tmp_path / "0" / "f1.npz").unlink()  # that of client 0
    own = Site(
        site_job(job, 0),
        1,
        net.sites[11].fingerprints,
        facts={},
        folder=tmp_path / "0",
        limits=limits,
    )
    told(own, net.sent[0][1])
    assert told(own, an_exchange(net)) == "limit"
    # Other rows have a ledger of their own.
    assert not refuses(site_job(job, 1), tmp_path / "0", limits)
    assert len(list((tmp_path / "0").glob("*.ledger.json"))) == 2


@pytest.mark.parametrize("channel", [PLAIN, MASKED], ids=["plain", "masked"])
def test_a_federation_without_noise_is_an_infinite_epsilon(channel, tmp_path):
    federation(job_with(channel), folder=tmp_path)
    said = []
    assert reply_of(job_with(LOUD), tmp_path / "0") == "privacy"
    site_of(job_with(LOUD), 0, tmp_path / "0", report=said.append)
    assert "an epsilon of inf" in said[0] and "without noise" in said[0]


@pytest.mark.parametrize("kind", ["measure", "conclude"])
def test_a_measurement_alone_is_an_infinite_epsilon(kind, tmp_path):
    job = job_with(PLAIN)
    net, _ = federation(job)
    site = site_of(job, 0, tmp_path / "0", conclude=lambda _: {"share": 0.5})
    told(site, net.sent[0][1])  # hello
    assert not isinstance(told(site, asked_for(job, an_exchange(net), 0, kind)), str)
    assert site.ledger.spent.measurements == 1
    few = site_of(job, 0, tmp_path / "0", limits=SiteLimits(max_exchanges=1))
    few.conclude = site.conclude
    asked = asked_for(job, an_exchange(net), 0, "conclude", federation="f2")
    told(few, with_header(net.sent[0][1], federation="f2"))
    assert told(few, asked) == "limit"
    assert reply_of(job_with(LOUD), tmp_path / "0") == "privacy"


@pytest.mark.slow
def test_two_federations_compose_at_their_own_noise(tmp_path):
    """2 blocks with the share of one, and in masked sums of 2, at noise 20 and 30."""
    other = MASKED | LOUD
    federation(job_with(NOISY), 5, folder=tmp_path)
    again(job_with(other), tmp_path, 7)
    ledger = SiteLedger(site_job(job_with(other), 0), SiteLimits(), tmp_path / "0")
    events = ((20 * math.sqrt(1 / 3 / 2), 5), (30 * math.sqrt(2 / 3 / 2), 7))
    assert epsilon_of(ledger.spent.releases, DELTA) == direct_epsilon(*events)
    file = next((tmp_path / "0").glob("*.ledger.json"))
    first, second = json.loads(file.read_text())["releases"]
    assert first == {
        "noise": 20.0,
        "participants": 3,
        "blocks": 2,
        "shares": 1,
        "delta": DELTA,
        "times": 5,
    }
    assert (second["noise"], second["shares"], second["times"]) == (30.0, 2, 7)


def test_rows_in_common_count_together(tmp_path):
    """A row more, or the same rows in another order and split, begin nothing anew."""
    job = site_job(job_with(LOUD), 0)
    federation(job_with(PLAIN), folder=tmp_path)
    data, folder = job.data, tmp_path / "0"
    turned = jax.tree.map(lambda leaf: leaf[:, 2::-1], (data.upper, data.lower))
    fewer = {"upper_sizes": data.upper_sizes - 1, "lower_sizes": data.lower_sizes - 1}
    for changed in (
        {"upper": turned[0], "lower": turned[1]},
        {"upper": data.lower, "lower": data.upper},
        fewer,
        {"weights": data.weights + 1},
        {"lower": jax.tree.map(lambda leaf: leaf.astype("float32"), data.lower)},
    ):
        some = replace(data, **changed)
        assert refuses(replace(job, data=some), folder) == "privacy"
    moved = jax.tree.map(lambda leaf: leaf + 1, (data.upper, data.lower))
    other = replace(data, upper=moved[0], lower=moved[1])
    assert not refuses(replace(job, data=other), folder)


def table(path, rows):
    """Write a table of rows, by their numbers."""
    lines = [f"{n / 7:.6f},{n % 5},{'yn'[n % 2]}" for n in rows]
    path.write_text("\n".join(["age,dose,ill", *lines]) + "\n")
    return path


def at_site(path, folder, **more):
    chosen = {"clients": 2, "batch": 4, **more}
    options = {"data": str(path), "label": "ill", "missing": "drop"}
    experiment = Experiment(
        "regularization", "fedbio-controls", options=options, **chosen
    )
    return build_site(experiment, 0, folder=folder, report=lambda _: None).ledger


@pytest.mark.slow
def test_a_table_is_known_whatever_is_made_of_it(tmp_path):
    rows, state = list(range(60)), tmp_path / "state"
    first = at_site(table(tmp_path / "a.csv", rows), state)
    first.exchange(0, 2, "f1", ["a reply"])

    def counted(name, these, **more):
        with at_site(table(tmp_path / name, these), state, **more)._all() as before:
            return before.exchanges

    assert counted("a.csv", rows, seed=5) == 1
    assert counted("b.csv", rows[::-1]) == 1
    assert counted("c.csv", [*rows, 60]) == 1
    assert counted("d.csv", rows[40:]) == 1
    assert counted("e.csv", range(100, 160)) == 0


def test_rows_of_files_are_lines_and_rows_of_arrays(tmp_path):
    one = table(tmp_path / "one.csv", range(4))
    assert list(rows_of_files(one)) == one.read_bytes().split(b"\n")[1:-1]
    folder = tmp_path / "arrays"
    folder.mkdir()
    features = np.arange(6.0).reshape(3, 2)
    np.save(folder / "features.npy", features)
    np.save(folder / "label.npy", np.arange(3))
    wanted = [row.astype(np.float32).tobytes() for row in features]
    assert list(rows_of_files(folder)) == wanted
    np.savez(tmp_path / "both.npz", features=features, label=np.arange(3))
    assert list(rows_of_files(tmp_path / "both.npz")) == wanted
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\1")
    assert len(list(rows_of_files(tmp_path / "image.png"))) == 1


def test_two_processes_see_what_the_other_released(tmp_path):
    job = site_job(job_with(PLAIN), 0)
    both = [SiteLedger(job, SiteLimits(max_exchanges=5), tmp_path) for _ in range(2)]
    for number in range(5):
        both[number % 2].exchange(0, 3, "f1", [str(number)])
    for ledger in both:
        with pytest.raises(RefusedError, match="5 replies, no more"):
            ledger.exchange(0, 3, "f1", ["another"])
    assert both[0].spent.exchanges == 5


def test_federations_in_turn_have_their_last_answers_again_for_nothing(tmp_path):
    ledger = SiteLedger(site_job(job_with(PLAIN), 0), SiteLimits(), tmp_path)
    last = [(f"f{number}", [str(number)]) for number in range(64)]
    for _ in range(2):
        for one in last:
            ledger.exchange(0, 3, *one)
    assert ledger.spent.exchanges == 64
    ledger.exchange(0, 3, "f64", ["64"])  # for which the oldest is forgotten
    ledger.exchange(0, 3, *last[1])
    assert ledger.spent.exchanges == 65
    ledger.exchange(0, 3, *last[0])
    assert ledger.spent.exchanges == 66


def test_a_ledger_of_before_counts_as_without_noise(tmp_path):
    """It says neither about which rows it is, nor what their noise was."""
    old = tmp_path / "client7.ledger.json"
    held = {"exchanges": 2, "measurements": 1, "releases": [[2, 3, 2]]}
    old.write_text(json.dumps({**held, "measured": {}, "concluded": {}}))
    before, said = old.read_bytes(), []
    assert reply_of(job_with(LOUD), tmp_path) == "privacy"
    site_of(job_with(LOUD), 0, tmp_path, report=said.append)
    assert "client7.ledger.json, of an earlier version" in said[0]
    assert "move it away" in said[0] and old.read_bytes() == before
    some, job = SiteLimits(max_exchanges=3), site_job(job_with(PLAIN), 0)
    assert [refuses(job, tmp_path, some, n) for n in "ab"] == ["", "limit"]
    old.write_text("{}")
    with pytest.raises(CheckpointError, match="client7.ledger.json is damaged"):
        site_of(job_with(PLAIN), 0, tmp_path)


def test_what_rows_are_known_by_stays_here_and_cannot_be_guessed(tmp_path):
    """Two folders know the same rows by other names, of which none travels."""
    job, names = job_with(PLAIN), set()
    net, _ = federation(job, folder=tmp_path)
    federation(job, folder=tmp_path / "again")
    for folder in (tmp_path / "0", tmp_path / "again" / "0"):
        files = list(folder.iterdir())
        assert all(one.stat().st_mode & 0o077 == 0 for one in files)
        names |= {one.name.partition(".")[0] for one in folder.glob("*.rows.npy")}
        rows = np.load(next(folder.glob("*.rows.npy"))).tobytes()
        for _, packet, answer in net.sent:
            assert rows[:8] not in packet and rows[:8] not in (answer or b"")
            assert not any(name.encode() in (answer or b"") for name in names)
    assert len(names) == 2
    (tmp_path / "0" / "ledger.key").unlink()
    with pytest.raises(CheckpointError, match=r"ledger.key is damaged or gone"):
        site_of(job, 0, tmp_path / "0")


@pytest.mark.parametrize("changed", ["rows.npy", "ledger.key"])
def test_no_ledger_is_overlooked_by_a_change_of_what_rows_are_known_by(
    changed, tmp_path
):
    """Else rows in common are found no more, and begin anew."""
    job = site_job(job_with(PLAIN), 0)
    SiteLedger(job, SiteLimits(), tmp_path).exchange(1, 3, "f1", ["a"])
    file = next(tmp_path.glob(f"*{changed}"))
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)
    sizes = {"lower_sizes": job.data.lower_sizes - 1}
    fewer = replace(job, data=replace(job.data, **sizes))
    with pytest.raises(CheckpointError, match=r"rows.npy cannot be read .*was changed"):
        SiteLedger(fewer, SiteLimits(), tmp_path)


def test_a_refusal_tells_no_number_of_the_ledger(tmp_path):
    ledger = SiteLedger(site_job(job_with(QUIET), 0), FEW, tmp_path)
    with pytest.raises(RefusedError) as refused:
        for number in range(9):
            ledger.exchange(2, 3, "f1", [str(number)])
    assert refused.value.reason == "privacy"
    assert not any(map(str.isdigit, refused.value.detail))


# Whether replies are added up, so that the noise of all hides a client.
ADDED_UP = {
    "mean": True,
    "secure": True,
    "median": False,
    "trimmed-mean:0.1": False,
    "geometric-median": False,
    "krum:1": False,
}


# Masked numbers are not compressed.
CODED = [(rule, "quantize:8") for rule in ADDED_UP if rule != "secure"]


@pytest.mark.parametrize(
    ("rule", "compress"), [*((rule, None) for rule in ADDED_UP), *CODED]
)
def test_simulated_and_deployed_runs_spend_the_same(rule, compress):
    """Of 5 replies of 2 blocks in 3 rounds, by a formula and by all who count."""
    job = job_with(NOISY | {"aggregate": rule, "compress": compress}, clients=5)
    alone = compress is not None or not ADDED_UP[rule]
    wanted = direct_epsilon((20.0 * math.sqrt((1 if alone else 5) / 5 / 2), 3))
    assert privacy_spent(job, Ledger(job), 3)["epsilon"] == wanted
    assert privacy_of_releases(job, {(2, 5): 3})["epsilon"] == wanted
    kind = release_of(job, 2, 5)
    assert epsilon_of({kind: 3}, DELTA) == wanted
    # With two who stayed away there is less noise in a sum.
    fewer = direct_epsilon((20.0 * math.sqrt((1 if alone else 3) / 5 / 2), 3))
    assert privacy_of_releases(job, {(2, 3): 3})["epsilon"] == fewer


@pytest.mark.slow
@pytest.mark.parametrize("rule", ADDED_UP)
def test_a_deployed_run_and_its_sites_say_what_a_simulation_does(rule):
    """A site without masks counts more: the server sees each reply, with its share."""
    job = job_with(NOISY | {"aggregate": rule}, clients=5)
    sites = {10 + k: site_of(job, k, minimum=5) for k in range(5)}
    server = server_of(job, Loopback(sites))
    execute(server, 3)
    spent = privacy_spent(job, Ledger(job), 3)
    assert server.privacy_spent() == {**spent, "releases": 3}
    shares = 5 if rule == "secure" else 1
    seen = direct_epsilon((20.0 * math.sqrt(shares / 5 / 2), 3))
    for site in sites.values():
        assert epsilon_of(site.ledger.spent.releases, DELTA) == seen
    assert (seen.expected == pytest.approx(spent["epsilon"])) == (rule != "mean")


def answer_to(site, packet):
    """Return the numbers that a site answers with, as they travel."""
    header, _, body = unpack(site.handle(renewed(packet)), 1 << 30)
    assert header.kind == "exchange", header.info
    return bytes(body)


@pytest.mark.parametrize("channel", [PLAIN, NOISY], ids=["plain", "noisy"])
def test_the_same_reply_given_again_is_one_release(channel, tmp_path):
    job, folder = job_with(channel), tmp_path / "0"
    net, _ = federation(job, folder=tmp_path)
    site, packet = site_of(job, 0, folder), an_exchange(net)
    first, counted = answer_to(site, packet), site.ledger.spent.exchanges
    # The first process of the site gave a reply with other noise.
    assert counted == (2 if channel == NOISY else 1)
    assert [answer_to(site, packet) for _ in range(3)] == [first] * 3
    assert site.ledger.spent.exchanges == counted
    # A server that was started again asks for it, too.
    assert answer_to(site, with_header(packet, attempt=2)) == first
    # Another batch, another point and another state are other replies.
    others = [with_header(packet, attempt=2, index=7), moved(job, packet)]
    assert first not in [answer_to(site, one) for one in others]
    assert site.ledger.spent.exchanges == counted + 2
    assert answer_to(site, with_header(packet, attempt=2)) != b""
    assert site.ledger.spent.exchanges == counted + 3


def moved(job, packet):
    """Return an exchange at another point."""
    header, listed, body = unpack(packet, 1 << 30)
    leaves = [np.asarray(leaf) + 1 for leaf in unpack_start(listed, body)]
    return pack(replace(header, attempt=2), leaves)


def test_after_a_restart_noise_is_drawn_anew_and_counts_anew(tmp_path):
    job = job_with(NOISY)
    net, _ = federation(job, folder=tmp_path)
    packet = an_exchange(net)
    given = set()
    for number in range(3):
        site = site_of(job, 0, tmp_path / "0")
        given |= {answer_to(site, packet), answer_to(site, packet)}
        assert site.ledger.spent.releases.total() == 2 + number
    assert len(given) == 3


def test_a_restart_between_equal_questions_changes_nothing(tmp_path):
    """The same point is measured again, and counts once; another is refused."""
    job = job_with(PLAIN)
    net, _ = federation(job)
    packet, hello = an_exchange(net), net.sent[0][1]
    one, other = (asked_for(job, packet, seed, exchange=9) for seed in range(2))
    answers = []
    for _ in range(3):
        site = site_of(job, 0, tmp_path)
        told(site, hello)
        answers.append(told(site, one))
        assert site.ledger.spent.measurements == 1
        assert told(site, other) == "measured"
    assert len(set(answers)) == 1 and isinstance(answers[0], int)


def test_a_request_that_was_refused_is_charged_once(tmp_path, monkeypatch):
    """Whoever carries packets could else use up the ledger of a site with one."""
    job = job_with(PLAIN)
    net, _ = federation(job)
    site = site_of(job, 0, tmp_path)
    told(site, net.sent[0][1])  # hello
    work = site.work.exchange
    monkeypatch.setattr(
        site.work, "exchange", lambda *asked: (*work(*asked)[:2], False)
    )
    refused = renewed(an_exchange(net))
    for _ in range(5):
        assert unpack(site.handle(refused), 1 << 30)[0].kind == "refused"
    assert site.ledger.spent.exchanges == 1


@pytest.mark.slow
@pytest.mark.parametrize("holds_nan", [False, True], ids=["finite", "not finite"])
def test_replies_are_counted_alike_whether_or_not_they_are_finite(holds_nan, tmp_path):
    """Two federations ask in turn for the same, and get other noise each time."""
    job = job_with(NOISY)
    net, _ = federation(job)
    if holds_nan:
        rows = jax.tree.map(lambda leaf: leaf * np.nan, job.data.lower)
        job = replace(job, data=replace(job.data, lower=rows))
    site, given = site_of(job, 0, tmp_path, limits=SiteLimits(max_exchanges=8)), []
    for _ in range(6):
        for name in ("f1", "f2"):
            told(site, with_header(net.sent[0][1], federation=name))
            asked = with_header(an_exchange(net), federation=name)
            header, _, body = unpack(site.handle(renewed(asked)), 1 << 30)
            given.append((header.info or {}).get("reason") or bytes(body))
    assert given[8:] == ["limit"] * 4 and len(set(given[:8])) == 8
    assert site.ledger.spent.exchanges == 8


@dataclass
class Unsteady:
    """A script in which sites are killed, before and after they answer.

    `given` are the replies that each site computed, as they would have traveled.
    """

    job: Job
    folder: Path
    seed: int
    given: dict[int, set[bytes]]
    killed: int = 0

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)

    def __call__(self, node, packet, net):
        if self.draw.random() < 0.2:
            self._kill(node, net)
        answer = net.sites[node].handle(packet)
        header, _, body = unpack(answer, 1 << 30)
        if header.kind == "exchange":
            self.given[node].add(bytes(body))
            if self.draw.random() < 0.1:
                self._kill(node, net)
                return None  # it was counted, and got lost
        return answer

    def _kill(self, node, net):
        self.killed += 1
        net.sites[node] = site_of(self.job, node - 10, self.folder / str(node - 10))


@pytest.mark.slow
@pytest.mark.parametrize("second", [LOUD, MASKED | LOUD], ids=["plain", "masked"])
def test_two_federations_with_kills_leave_an_exact_ledger(
    second, tmp_path, monkeypatch
):
    """Every reply with noise of its own counts once, at the noise that it had."""
    monkeypatch.setattr(exchanges_module, "_PAUSE", 0.0)
    counts, killed = [], 0
    for number, channel in enumerate([NOISY, second], 1):
        monkeypatch.setattr(own_federation, "FEDERATION", f"f{number}")
        job = job_with(channel)
        script = Unsteady(job, tmp_path, number, {10 + k: set() for k in range(3)})
        sites = {10 + k: site_of(job, k, tmp_path / str(k)) for k in range(3)}
        terms = replace(TERMS, minimum=3)  # so that what got lost is asked for again
        execute(server_of(job, Loopback(sites, script), terms=terms), 40)
        counts.append(script.given)
        killed += script.killed
    assert killed > 50
    shares = 2 if second is not LOUD else 1
    for client in range(3):
        first, then = (len(one[10 + client]) for one in counts)
        assert first > 40 and then > 40
        events = (
            (20 / math.sqrt(3 * 2), first),
            (30 * math.sqrt(shares / 3 / 2), then),
        )
        rows = site_job(job_with(second), client)
        ledger = SiteLedger(rows, SiteLimits(), tmp_path / str(client))
        assert ledger.spent.exchanges == first + then
        assert epsilon_of(ledger.spent.releases, DELTA) == direct_epsilon(*events)
        # The next reply is refused just below what it would be, and given above.
        more = (30 / math.sqrt(2), 1)
        after = direct_epsilon(*events, more).expected
        for factor, reason in ((0.999, "privacy"), (1.001, "")):
            limits = SiteLimits(max_epsilon=after * factor)
            assert refuses(rows, tmp_path / str(client), limits, blocks=2) == reason


@pytest.mark.slow
def test_two_deployed_federations_are_one_ledger(capsys):
    """They have different noise, and one state folder a site; nothing is killed."""
    soak.main("masked", rounds=4, pause=math.inf)
    lines = re.findall("by its ledger (.*), composed (.*)", capsys.readouterr().out)
    assert len(lines) == soak.NODES
    assert all(one == other for one, other in lines)
