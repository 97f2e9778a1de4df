"""A federation over packets makes the simulator's numbers, whatever goes wrong."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel._blocks import is_any
from fedbilevel._files import write_arrays
from fedbilevel.algorithms.wrappers.base import AbstractWrapper
from fedbilevel.errors import DamagedFileWarning, FedbilevelError, NonFiniteError
from fedbilevel.experiments.clients import read_channel
from fedbilevel.federation import SiteLimits
from fedbilevel.federation.checkpoints import SiteCheckpoints
from fedbilevel.federation.refusals import REASONS
from fedbilevel.federation.server.blind_job import blind_job
from fedbilevel.federation.wire import pack, unpack, unpack_start
from fedbilevel.runtime import Checkpoints, Sampling, SimulatorRuntime, count, execute
from fedbilevel.runtime.exchange import start_kept
from fedbilevel.runtime.job import ABSENT, RENEWED
from tests.cases import (
    CASES,
    DEMANDING,
    Case,
    case_of,
    cohort_of,
    data_for,
    for_cases,
    has_several_phases,
    keeps_something,
    quadratic_data,
    quadratic_job,
)
from tests.federation import (
    FEDERATION,
    TERMS,
    Loopback,
    of_all_rows,
    server_of,
    site_of,
)

BSGM, BSGVRM = (case_of(name).algorithm for name in ("local-bsgm", "local-bsgvrm"))


def kind_of(case: Case) -> tuple[bool, ...]:
    """Return what faults may meet: memories, private blocks, nests, chains."""
    private = is_any(case.algorithm.private_blocks())
    memory = case.algorithm.init_client(jnp.zeros(1), jnp.zeros(1)) is not None
    return memory, private, has_several_phases(case), case.chains is not None


# The first algorithm of every kind that keeps something, or has many exchanges a round.
FIRST_OF_KIND = {
    kind_of(case): case.name
    for case in reversed(CASES)
    if not case.pools and (keeps_something(case) or has_several_phases(case))
}


def assert_close(a, b, tolerance):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def loopback(job, folder=None, **more) -> Loopback:
    """Return sites that keep what they have to in folders of their own."""
    own = [None if folder is None else folder / str(k) for k in range(job.clients)]
    return Loopback({10 + k: site_of(job, k, own[k], **more) for k in range(len(own))})


@pytest.mark.slow
@DEMANDING
def test_packets_make_the_numbers_of_the_simulator(case):
    job = quadratic_job(case.algorithm, data_for(case, 3))
    simulated = execute(SimulatorRuntime(job), 3)
    net = loopback(job)
    deployed = execute(server_of(job, net), 3)
    assert_close(simulated.state.server, deployed.state.server, 1e-11)
    # The norm of a mean gradient takes gradients, which stay at their sites.
    told = {n: c for n, c in simulated.columns.items() if n != "lower_gradient_norm"}
    assert_close(told, deployed.columns, 1e-11)
    # Bytes on the wire are those that were computed, and headers.
    costs = count(job, 3)
    down, up, headers = deployed.state.traffic
    assert down + up - headers == costs["bytes_down"] + costs["bytes_up"]
    assert len(deployed.state.attendance) == costs["exchanges"]


class EveryoneInRounds(AbstractWrapper):
    """A cohort sets up, everyone takes part in rounds."""

    def phases(self) -> Any:
        phases = super().phases()
        return tuple(dataclasses.replace(phase, everyone=True) for phase in phases)


def with_cohort(name: str):
    """Return a job of which a cohort is drawn for every exchange."""
    if name == "everyone":
        algorithm, participants = EveryoneInRounds(BSGVRM), 2
    else:
        case = case_of(name)
        algorithm, participants = case.algorithm, case.chains or 2
    return quadratic_job(algorithm, quadratic_data(5), participants=participants)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["local-bsgvrm", "fedbioacc-local", "fednest", "fedmbo", "everyone"]
)
def test_a_cohort_over_packets_makes_the_numbers_of_the_simulator(name):
    job = with_cohort(name)
    simulated = execute(SimulatorRuntime(job), 3)
    deployed = execute(server_of(job, loopback(job)), 3)
    assert_close(simulated.state.server, deployed.state.server, 1e-11)
    costs, (down, up, headers) = count(job, 3), deployed.state.traffic
    assert down + up - headers == costs["bytes_down"] + costs["bytes_up"]
    present = (deployed.state.attendance != ABSENT).sum(axis=1).tolist()
    counts = [2, 5, 5, 5] if name == "everyone" else [job.participants] * len(present)
    assert present == counts and len(present) == costs["exchanges"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedbio", "local-bsgvrm", "fednest", "fedmbo", "newton-bfgs", "fed-f2sa"]
)
def test_a_served_run_counts_the_products_of_the_simulator(name):
    """The server has neither rows nor losses."""
    case = case_of(name)
    job = quadratic_job(
        case.algorithm, data_for(case, 5), participants=cohort_of(case, 5)
    )
    start, sampling = (job.x, job.y), Sampling(job.upper_batch, job.participants)
    how = {"sampling": sampling, "private": job.private}
    blind = blind_job(job.algorithm, start, job.clients, job.key, **how)
    here, there = count(job, 3), count(blind, 3)
    assert sum(here["calls"].values()) > 0
    for kind in ("calls", "exchanges", "floats_up", "floats_down", "bytes_up"):
        assert here[kind] == there[kind], kind


class KilledError(Exception):
    """The server's process ended here."""


class Mishaps:
    """Loses packets and replies, restarts sites with, without or with old state.

    `killed` are packets before which the server dies.
    """

    def __init__(self, job, folder, seed, killed=()):
        self.job, self.folder, self.killed = job, folder, killed
        self.draw, self.count = np.random.default_rng(seed), 0
        self.saved: dict[int, dict[str, bytes]] = {}

    def __call__(self, node, packet, net):
        self.count += 1
        if self.count in self.killed:
            raise KilledError
        what = self.draw.choice(
            ["fine", "lost", "reply lost", "twice", "restart", "forget", "old state"],
            p=[0.7, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05],
        )
        place = self.folder / str(node)
        if what == "forget":
            shutil.rmtree(place, ignore_errors=True)
        elif what == "old state" and node in self.saved:
            place.mkdir(exist_ok=True)
            for name, content in self.saved[node].items():
                (place / name).write_bytes(content)
        elif place.exists():
            self.saved[node] = {f.name: f.read_bytes() for f in place.iterdir()}
        if what in ("restart", "forget", "old state"):
            net.sites[node] = site_of(self.job, node - 10, place)
        if what == "lost":
            return None
        answer = net.sites[node].handle(packet)
        if what == "twice":
            again = net.sites[node].handle(packet)
            assert unpack(again, 1 << 30)[2] == unpack(answer, 1 << 30)[2]
        return None if what == "reply lost" else answer


def serve_through_it(job, net, folder, rounds):
    """Serve until the end; a server that died is started again."""
    keep = Checkpoints(folder, every_rounds=1)
    attempt = 1
    while True:
        try:
            runtime = server_of(job, net, attempt=attempt)
            return execute(runtime, rounds, checkpoints=keep), attempt
        except KilledError:
            attempt += 1
            assert attempt < 5


@pytest.mark.slow
@for_cases(lambda case: case.name in FIRST_OF_KIND.values())
def test_whatever_goes_wrong_the_record_replays(case, tmp_path):
    job = quadratic_job(case.algorithm, data_for(case, 3))
    renewed = absent = 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        clients = range(job.clients)
        sites = {10 + k: site_of(job, k, folder / str(10 + k)) for k in clients}
        # Once between two rounds, once within one.
        script = Mishaps(job, folder, seed, killed=(9, 26))
        net = Loopback(sites, script)
        deployed, attempts = serve_through_it(job, net, folder / "server", 5)
        assert attempts == 3
        record = deployed.state.attendance
        replayed = execute(SimulatorRuntime(job.replaying(record)), 5)
        both = (deployed.state.server, replayed.state.server)
        if case.chains:
            # What stands in the place of a chain that nobody began means nothing.
            both = tuple(case.algorithm.point(server) for server in both)
        assert_close(both[0], both[1], 1e-11)
        for client in clients:
            checkpoints = net.sites[10 + client].checkpoints.get(FEDERATION)
            last = int(deployed.state.accepted[client])
            kept = None if checkpoints is None else checkpoints.at(last)
            if kept is not None:  # not forgotten after the last exchange
                expected = jax.tree.map(
                    lambda leaf, k=client: leaf[k], replayed.state.clients
                )
                assert_close(kept, expected, 1e-11)
        renewed += int((record == RENEWED).sum())
        absent += int((record == ABSENT).sum())
    # Things did go wrong.
    assert absent > 4
    keeps = bool(jax.tree.leaves(start_kept(job)))
    assert renewed > 4 if keeps else renewed == 0


def test_state_of_another_client_or_damaged_is_put_aside(tmp_path):
    job = quadratic_job(BSGVRM, quadratic_data(2))
    folders = [tmp_path / str(k) for k in range(2)]
    net = Loopback({10 + k: site_of(job, k, folders[k]) for k in range(2)})
    execute(server_of(job, net), 2)
    file = f"{FEDERATION}.npz"
    for content in ((folders[1] / file).read_bytes(), b"no archive"):
        (folders[0] / file).write_bytes(content)
        with pytest.warns(DamagedFileWarning, match="put aside as f1.damaged"):
            checkpoints = SiteCheckpoints(start_kept(job), folders[0], FEDERATION, 0)
        assert checkpoints.kept == {} and not (folders[0] / file).exists()
        assert (folders[0] / file).with_suffix(".damaged").read_bytes() == content


def test_state_of_an_older_protocol_is_neither_used_nor_lost(tmp_path):
    job = quadratic_job(BSGVRM, quadratic_data(2))
    here: list[str] = []
    net = loopback(job, tmp_path, report=here.append)
    files = [tmp_path / str(client) / f"{FEDERATION}.npz" for client in range(2)]
    about = np.frombuffer(b'{"client": 0, "attempt": 1, "exchanges": []}', np.uint8)
    for file in files:
        write_arrays(file, {"about": about})
    told, before = [], [file.read_bytes() for file in files]
    with pytest.raises(FedbilevelError, match=r"clients \[0, 1\] did not come"):
        server_of(job, net, report=told.append)
    assert any(REASONS["version"] in line for line in told)
    assert any("version" in line and "protocol 2 or older" in line for line in here)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.slow
def test_a_reduction_waits_for_as_many_replies_as_it_needs():
    job, lost = job_through(BSGM, 5, aggregate="krum:1"), []

    def script(node, packet, net):
        again = unpack(packet, 1 << 30)[0].kind == "exchange" and len(lost) < 2
        if again and node == 12:
            lost.append(node)
            return None
        return net.sites[node].handle(packet)

    net, told = loopback(job), []
    net.script = script
    deployed = execute(server_of(job, net, report=told.append), 1)
    assert (deployed.state.attendance != ABSENT).all() and len(lost) == 2
    assert sum("4 replies are too few" in line for line in told) == 2
    simulated = execute(SimulatorRuntime(job), 1)
    assert_close(simulated.state.server, deployed.state.server, 1e-11)


def repacked(packet, change):
    """Return a packet with other leaves, and a checksum that fits."""
    header, listed, body = unpack(packet, 1 << 30)
    leaves = change([leaf.copy() for leaf in unpack_start(listed, body)])
    return pack(header, leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("not-finite", lambda leaf: np.where(np.arange(leaf.size) == 0, np.nan, leaf)),
        pytest.param("not-finite", lambda leaf: leaf + np.inf, marks=pytest.mark.slow),
        ("implausible", lambda leaf: 1e6 * leaf),
    ],
)
def test_a_reply_that_cannot_be_is_left_out_and_named(reason, change, tmp_path):
    job = quadratic_job(BSGVRM, quadratic_data(4))

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        header, _, _ = unpack(packet, 1 << 30)
        if (header.kind, header.round, node) == ("exchange", 2, 12):
            return repacked(answer, lambda leaves: [change(leaf) for leaf in leaves])
        return answer

    net, named = loopback(job), []
    net.script = script
    runtime = server_of(job, net, left_out=named.append)
    deployed = execute(runtime, 3)
    assert [(e["round"], e["client"], e["reason"]) for e in named] == [(2, 2, reason)]
    record = deployed.state.attendance
    assert (record == ABSENT).sum() == 1
    replayed = execute(SimulatorRuntime(job.replaying(record)), 3)
    assert_close(deployed.state.server, replayed.state.server, 1e-11)


@pytest.mark.slow
def test_when_all_replies_are_not_finite_the_run_fails_with_its_place():
    job = quadratic_job(BSGVRM, quadratic_data(3))

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        if unpack(packet, 1 << 30)[0].round < 2:
            return answer
        return repacked(answer, lambda leaves: [leaf + np.nan for leaf in leaves])

    net = loopback(job)
    net.script = script
    with pytest.raises(NonFiniteError, match="round 2, phase 'local', client 0"):
        execute(server_of(job, net), 3)


def test_sites_that_mean_something_else_are_not_taken():
    job = quadratic_job(BSGVRM, quadratic_data(3))
    other = quadratic_job(BSGM, quadratic_data(3))
    net, told = loopback(job), []
    net.sites[11] = site_of(other, 1)
    runtime = server_of(job, net, report=told.append)
    deployed = execute(runtime, 2)
    assert (deployed.state.attendance[:, 1] == ABSENT).all()
    assert any("client 1 is not taken" in line for line in told)


def test_a_node_that_says_it_is_another_client_is_not_taken():
    job = quadratic_job(BSGM, quadratic_data(2))
    net, told = loopback(job), []
    net.sites[12] = site_of(job, 0)  # came last, so would win
    terms = dataclasses.replace(TERMS, keys=("key10", "key11"))
    runtime = server_of(job, net, terms=terms, report=told.append)
    assert {k: one.node for k, one in runtime.roster.members.items()} == {0: 10, 1: 11}
    assert [line for line in told if "node 12 is not taken: key" in line]


@pytest.mark.slow
def test_a_client_that_is_late_costs_its_deadline_once():
    job, waits = quadratic_job(BSGM, quadratic_data(3)), []
    net = loopback(job)

    class Slow(Loopback):
        def exchange(self, packets, seconds, enough, largest):
            others = {n: p for n, p in packets.items() if n != 11}
            came = super().exchange(others, 0, 0, largest)
            if "exchange" in kinds_of(packets):
                # How long a transport would wait, were nothing else to come.
                times = np.arange(0, seconds, 0.5)
                waits.append(
                    next((t for t in times if enough(set(came), t)), seconds)
                    if 11 in packets
                    else 0.0
                )
            else:
                own = {n: p for n, p in packets.items() if n == 11}
                came |= super().exchange(own, 0, 0, largest)
            return came

    slow = Slow(net.sites)
    deployed = execute(server_of(job, slow), 4, measure_every=4)
    assert waits[0] == TERMS.deadline and max(waits[1:]) <= 2.0
    assert deployed.state.attendance.tolist() == [[1, 0, 1]] * 4


def test_nodes_that_are_listed_but_dead_cost_a_deadline_once():
    job, waits = quadratic_job(BSGM, quadratic_data(3)), []

    class Listed(Loopback):
        """Lists nodes that were killed, as Flower does until it notices."""

        dead = {7, 8}

        def nodes(self):
            return super().nodes() | self.dead

        def exchange(self, packets, seconds, enough, largest):
            alive = {n: p for n, p in packets.items() if n not in self.dead}
            came = super().exchange(alive, seconds, enough, largest)
            if set(packets) != set(came):
                times = np.arange(0, seconds, 0.5)
                ends = (t for t in times if enough(set(came), t))
                waits.append(next(ends, seconds))
            return came

    net = Listed(loopback(job).sites)
    server_of(job, net)
    assert waits == [0.0]  # all clients are there without them
    del net.sites[11]
    waits.clear()
    server_of(job, net, attempt=2)
    assert waits[0] == TERMS.deadline and max(waits[1:]) <= 1.5 and len(waits) > 2


def kinds_of(packets):
    return {unpack(packet, 1 << 30)[0].kind for packet in packets.values()}


def job_through(algorithm, clients, **settings):
    """Return a job whose replies go through a channel."""
    channel = read_channel(**settings)
    return quadratic_job(algorithm, quadratic_data(clients), channel=channel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"clip": 0.5, "compress": "topk:0.4"},
        {"compress": "quantize:8"},
        {"aggregate": "krum:1"},
    ],
    ids=str,
)
def test_channels_make_the_same_numbers_over_packets(settings):
    job = job_through(BSGVRM, 5, **settings)
    simulated = execute(SimulatorRuntime(job), 3)
    deployed = execute(server_of(job, loopback(job)), 3)
    assert_close(simulated.state.server, deployed.state.server, 1e-10)
    costs, (down, up, headers) = count(job, 3), deployed.state.traffic
    assert down + up - headers == costs["bytes_down"] + costs["bytes_up"]


@pytest.mark.slow
def test_noise_is_the_sites_own_secret_and_of_the_right_size():
    """Two federations with one key differ by noise, as large as it was asked to be."""
    job = job_through(BSGM, 3, clip=0.1, noise=50.0)
    ends = []
    for _ in range(16):
        state = execute(server_of(job, loopback(job)), 1).state.server
        ends.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)]))
    spread = np.std(np.asarray(ends), axis=0, ddof=1)
    # The sum has noise * clip, the mean of three a third; 10 numbers, 16 federations.
    assert abs(np.sqrt(np.mean(spread**2)) / (50 * 0.1 / 3) - 1) < 0.25


@pytest.mark.parametrize("lost", [pytest.param((), marks=pytest.mark.slow), (12,)])
def test_a_secure_mean_is_the_mean_and_no_reply_is_seen(lost, tmp_path):
    plain = of_all_rows(quadratic_job(BSGVRM, quadratic_data(4)))
    job = of_all_rows(job_through(BSGVRM, 4, aggregate="secure"))
    net = loopback(job, tmp_path, limits=SiteLimits(cohorts="any"))

    def script(node, packet, one):
        answer = one.sites[node].handle(packet)
        header = unpack(packet, 1 << 30)[0]
        gone = node in lost and (header.kind, header.round) == ("exchange", 2)
        return None if gone else answer

    net.script = script
    deployed = execute(server_of(job, net), 3)
    record = deployed.state.attendance
    assert (record == ABSENT).sum() == len(lost)
    replayed = execute(SimulatorRuntime(plain.replaying(record)), 3)
    for mean, exact in zip(
        jax.tree.leaves(deployed.state.server),
        jax.tree.leaves(replayed.state.server),
        strict=True,
    ):
        assert np.linalg.norm(mean - exact) < 1e-4 * np.linalg.norm(exact)
    seen = [
        np.frombuffer(body, np.uint64, count=listed[0][1][0])
        for answer in [answer for _, _, answer in net.sent if answer]
        for header, listed, body in [unpack(answer, 1 << 30)]
        if header.kind == "exchange"
    ]
    # All that the server got: words that look drawn at random, whatever they hide.
    words = np.concatenate(seen)
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert len(seen) == 16 - len(lost) and abs(ones - 0.5) < 5 * 0.5 / np.sqrt(
        64 * len(words)
    )
    if not lost:
        costs, (down, up, headers) = count(job, 3), deployed.state.traffic
        # Two words each, and for every two clients a row that goes up with the reply
        # (a box of 36 and checks of 16 bytes), a tag up and down, the box down, and a
        # share and a seed up.
        more = 4 * 16 + 4 * 4 * ((36 + 16) + 2 * 16 + 36 + (16 + 32))
        assert costs["exchanges"] == 4
        total = costs["bytes_down"] + costs["bytes_up"] + 4 * more
        assert down + up - headers == total


def test_secure_sites_keep_their_keys_to_themselves(tmp_path):
    job = job_through(BSGVRM, 2, aggregate="secure")
    folders = [tmp_path / str(k) for k in range(2)]
    net = Loopback({10 + k: site_of(job, k, folders[k]) for k in range(2)})
    execute(server_of(job, net), 2)
    (file,) = folders[0].glob("*.keys.json")
    assert file.stat().st_mode & 0o777 == 0o600
    secret = json.loads(file.read_text())["private"]
    told = b"".join(packet + (answer or b"") for _, packet, answer in net.sent)
    assert secret.encode() not in told and bytes.fromhex(secret) not in told
    # Masks are used once: another message under an old number is refused.
    asked = [p for n, p, _ in net.sent if n == 10 and b'"exchange":1,' in p]
    old = [p for p in asked if unpack(p, 1 << 30)[0].kind == "exchange"][0]
    header, listed, body = unpack(old, 1 << 30)
    header = dataclasses.replace(header, number=header.number + 1000)
    old = pack(header, unpack_start(listed, body))
    reply, _, _ = unpack(site_of(job, 0, folders[0]).handle(old), 1 << 30)
    assert reply.kind == "refused" and (reply.info or {})["reason"] == "mask"
