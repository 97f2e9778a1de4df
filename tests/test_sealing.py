"""Packets of others, old ones and ones from beyond reach are refused by name."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from fedbilevel.deployment.serving import make_keys
from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.signatures import (
    _REPLY,
    _REQUEST,
    KeyFiles,
    Signatures,
    make_key_pair,
    read_private_key,
    read_public_key,
    server_seal,
    site_seal,
)
from fedbilevel.federation.wire import (
    CHECKSUM,
    EVERYONE,
    START_BYTES,
    Header,
    Parts,
    Seal,
    pack,
    unpack,
    unpack_start,
)
from fedbilevel.runtime import execute
from fedbilevel.runtime.job import ABSENT
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import FEDERATION, TERMS, Loopback, server_of, site_of

JOB = quadratic_job(case_of("local-bsgvrm").algorithm, quadratic_data(2))
MOST = 1 << 30


class Keys:
    """The seals of a server and two sites, and of a third that is registered."""

    def __init__(self, folder) -> None:
        self.folder, self.files = folder, make_keys(folder, 3)
        self.server = server_seal(self.files)
        self.sites = [site_seal(k, self.of_site(k)) for k in range(3)]

    def of_site(self, client: int) -> KeyFiles:
        own = self.folder / "keys" / str(client)
        return KeyFiles(own, (self.folder / "keys" / "server.pub",))

    def forged(self, author: int, key: int, purpose: bytes) -> Signatures:
        """Return a seal in somebody's name, with the key of a site."""
        private = read_private_key(self.of_site(key).private)
        server = read_public_key(self.of_site(key).peers[0])
        known = {EVERYONE: server}
        return Signatures(author, private, known, writes=purpose, reads=_REQUEST)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Keys:
    return Keys(tmp_path_factory.mktemp("trial"))


def signed(keys: Keys, folder=None, script=None) -> Loopback:
    """Return two sites that sign, and know the server's key."""
    # All leaves are in every packet, so that it can be packed again.
    sites = {
        10 + k: site_of(
            JOB, k, folder and folder / str(k), holds=False, seal=keys.sites[k]
        )
        for k in range(2)
    }
    return Loopback(sites) if script is None else Loopback(sites, script)


def sent_to(net: Loopback, node: int, kind: str) -> list[bytes]:
    """Return the requests of a kind that a node was sent."""
    packets = [packet for one, packet, _ in net.sent if one == node]
    return [packet for packet in packets if read(packet)[0].kind == kind]


def read(packet: bytes) -> tuple[Header, list, memoryview]:
    """Read a signed packet, as whoever sees it can."""
    return unpack(packet, MOST, _Whoever())


class _Whoever(Seal):
    """A seal that believes everybody."""

    size = Signatures.size

    def mark(self, content: Parts) -> bytes:
        raise NotImplementedError

    def author(self, content: Parts, mark: bytes) -> None:
        del content, mark


def again(packet: bytes, seal: Seal, **changes: Any) -> bytes:
    """Return a packet with other fields in its header, under a seal."""
    header, listed, body = read(packet)
    return pack(replace(header, **changes), unpack_start(listed, body), seal=seal)


def reason(answer: bytes, seal: Seal) -> str:
    """Return why a site refused."""
    header, _, _ = unpack(answer, MOST, seal)
    assert header.kind == "refused" and header.info, header
    return header.info["reason"]


@pytest.mark.slow
def test_signatures_change_no_number(keys):
    sites = {10 + k: site_of(JOB, k, holds=False) for k in range(2)}
    plain = execute(server_of(JOB, Loopback(sites)), 3)
    sealed = execute(server_of(JOB, signed(keys), seal=keys.server), 3)
    jax.tree.map(np.testing.assert_array_equal, plain.state.server, sealed.state.server)
    # 68 bytes more for every packet: 3 rounds and a setup, 2 clients.
    assert sealed.state.traffic[0] - plain.state.traffic[0] == 8 * 68


@pytest.mark.parametrize("kind", ["hello", "exchange", "measure"])
def test_a_registered_node_cannot_speak_as_the_server(keys, kind, tmp_path):
    attacks: Sequence[Seal] = (
        keys.forged(EVERYONE, 2, _REQUEST),  # as the server, with its own key
        keys.forged(2, 2, _REQUEST),  # as itself
        keys.sites[2],  # as itself, and as if it were a reply
        CHECKSUM,
    )
    said = []

    def script(node, packet, net):
        if node == 10 and read(packet)[0].kind == kind:
            file = tmp_path / "0" / f"{FEDERATION}.npz"
            before = file.read_bytes() if file.exists() else None
            for seal in attacks:
                forged = again(packet, seal, attempt=2**50)
                said.append(reason(net.sites[10].handle(forged), keys.server))
            assert (file.read_bytes() if file.exists() else None) == before
        return net.sites[node].handle(packet)

    net = signed(keys, tmp_path, script)
    done = execute(server_of(JOB, net, seal=keys.server), 2)
    assert len(said) >= len(attacks) and set(said) == {"signature"}
    # The real server goes on, and so does one that was started again.
    assert (done.state.attendance != ABSENT).all()
    restarted = server_of(JOB, net, attempt=2, seal=keys.server)
    assert sorted(restarted.roster.members) == [0, 1]


@pytest.mark.parametrize(
    ("author", "key", "purpose"), [(0, 1, _REPLY), (1, 1, _REPLY), (0, 0, _REQUEST)]
)
def test_a_node_cannot_reply_for_another(keys, author, key, purpose):
    """The key of client 1 in the name of 0, its own name, and another purpose."""
    forger, named = keys.forged(author, key, purpose), []

    def script(node, packet, net):
        answer, asked = net.sites[node].handle(packet), read(packet)[0]
        wrong = (asked.kind, asked.round, node) == ("exchange", 2, 10)
        return again(answer, forger) if wrong else answer

    net = signed(keys, script=script)
    done = execute(server_of(JOB, net, seal=keys.server, left_out=named.append), 2)
    told = [(one["round"], one["client"], one["reason"]) for one in named]
    assert told == [(2, 0, "signature")]
    assert (done.state.attendance == ABSENT).sum() == 1


def test_what_another_client_signed_is_not_taken_for_this_one(keys):
    named = []

    def script(node, packet, net):
        asked = read(packet)[0]
        # Once, node 10 passes on what client 1 answers to the same request.
        wrong = (asked.kind, asked.round, node) == ("exchange", 2, 10) and not named
        return net.sites[11 if wrong else node].handle(packet)

    net = signed(keys, script=script)
    execute(server_of(JOB, net, seal=keys.server, left_out=named.append), 2)
    assert [(one["client"], one["reason"]) for one in named] == [(0, "client")]


def test_a_hello_in_the_name_of_another_is_not_taken(keys):
    told, net = [], signed(keys)
    net.sites[12] = site_of(JOB, 0, seal=keys.forged(0, 2, _REPLY))
    runtime = server_of(JOB, net, seal=keys.server, report=told.append)
    members = {k: one.node for k, one in runtime.roster.members.items()}
    assert members == {0: 10, 1: 11}
    assert [line for line in told if "node 12 is not taken: signature" in line]


@pytest.mark.parametrize("restarted", [False, True])
def test_no_recorded_request_is_answered_again(keys, restarted, tmp_path):
    net = signed(keys, tmp_path)
    execute(server_of(JOB, net, seal=keys.server), 2)
    recorded = [packet for node, packet, _ in net.sent if node == 10]
    assert {read(one)[0].kind for one in recorded} == {"hello", "exchange", "measure"}
    if restarted:
        net.sites[10] = site_of(JOB, 0, tmp_path / "0", seal=keys.sites[0])
    file = tmp_path / "0" / f"{FEDERATION}.npz"
    before = file.read_bytes()
    *older, newest = recorded
    said = [reason(net.sites[10].handle(one), keys.server) for one in older]
    assert set(said) == {"replayed"}
    # The newest one gets the very bytes that it got, or after a restart nothing.
    (*_, last) = [answer for node, _, answer in net.sent if node == 10]
    answer = net.sites[10].handle(newest)
    assert answer != last if restarted else answer == last
    assert not restarted or reason(answer, keys.server) == "replayed"
    assert file.read_bytes() == before
    execute(server_of(JOB, net, attempt=2, seal=keys.server), 1)
    said = [reason(net.sites[10].handle(one), keys.server) for one in recorded]
    assert set(said) == {"attempt"}


def test_no_recorded_reply_is_taken_again(keys):
    """Neither that of another exchange, nor one to the same that was made again."""
    recorded, named, asked = [], [], []

    def script(node, packet, net):
        answer, header = net.sites[node].handle(packet), read(packet)[0]
        if header.kind != "exchange" or header.round != 2:
            recorded.extend([answer] if node == 10 else [])
            return answer
        asked.append(node)
        if node == 11:  # is lost at first, so that the exchange is made again
            return None if len(asked) <= 2 else answer
        recorded.append(answer)
        return recorded[-2] if len(asked) <= 4 else answer

    net = signed(keys, script=script)
    terms = replace(TERMS, minimum=2)
    server = server_of(JOB, net, seal=keys.server, terms=terms, left_out=named.append)
    done = execute(server, 2)
    # First a reply of the round before, then the one that was withheld, then the right.
    told = [(one["client"], one["reason"]) for one in named]
    assert told == [(0, "replayed"), (0, "replayed")] and len(asked) == 6
    assert (done.state.attendance != ABSENT).all()


def other_signature(packet: bytes) -> bytes:
    """Return a packet under another signature, which whoever sees one can compute."""
    order = int(
        "ffffffffffffffffffffffffffffffffffffffffffffffff"
        "c7634d81f4372ddf581a0db248b0a77aecec196accc52973",
        16,
    )
    end = START_BYTES + Signatures.size
    s = int.from_bytes(packet[end - 48 : end], "big")
    return packet[: end - 48] + (order - s).to_bytes(48, "big") + packet[end:]


def test_who_brings_a_request_first_shuts_nobody_out(keys, tmp_path):
    """A node that was sent it, too, passes it on before the site has seen it."""

    def script(node, packet, net):
        early = net.sites[node].handle(other_signature(packet))
        file = tmp_path / str(node - 10) / f"{FEDERATION}.npz"
        before = file.read_bytes()
        answer = net.sites[node].handle(packet)
        assert answer == early and file.read_bytes() == before
        return answer

    net = signed(keys, tmp_path, script)
    done = execute(server_of(JOB, net, seal=keys.server), 2)
    assert (done.state.attendance != ABSENT).all()


def test_a_request_to_one_client_is_nothing_to_another(keys, tmp_path):
    """Client 1 missed an exchange, so that the two are asked differently."""
    said = []

    def script(node, packet, net):
        header = read(packet)[0]
        if (header.kind, header.round, node) == ("exchange", 1, 11):
            return None
        if (header.kind, header.round, node) == ("exchange", 2, 10):
            before = (tmp_path / "1" / f"{FEDERATION}.npz").read_bytes()
            said.append(reason(net.sites[11].handle(packet), keys.server))
            assert (tmp_path / "1" / f"{FEDERATION}.npz").read_bytes() == before
        return net.sites[node].handle(packet)

    net = signed(keys, tmp_path, script)
    done = execute(server_of(JOB, net, seal=keys.server), 2)
    assert said == ["client"]
    assert done.state.attendance[:, 1].tolist() == [1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "jump"),
    [
        ("attempt", 2**50),
        ("attempt", 10_002),
        ("number", 2**40),
        ("exchange", 2**40),
        ("round", 2**40),
        ("index", 2**30),
        ("accepted", 2**40),
        ("kept", 2**40),
    ],
)
def test_not_even_the_server_can_jump(keys, name, jump, tmp_path):
    """What it signs by mistake leaves a site as it was, and the right one is taken."""
    said = []

    def script(node, packet, net):
        if node == 10 and read(packet)[0].kind == "exchange":
            file = tmp_path / "0" / f"{FEDERATION}.npz"
            before = file.read_bytes()
            jumped = again(packet, keys.server, **{name: jump})
            said.append(reason(net.sites[10].handle(jumped), keys.server))
            assert file.read_bytes() == before
        return net.sites[node].handle(packet)

    net = signed(keys, tmp_path, script)
    done = execute(server_of(JOB, net, seal=keys.server), 2)
    assert set(said) == {"jump"} and len(said) == 3
    assert (done.state.attendance != ABSENT).all()


def test_a_site_may_have_been_away_for_long(keys, tmp_path):
    """It comes back after a thousand starts and a million exchanges."""
    net = signed(keys, tmp_path)
    execute(server_of(JOB, net, seal=keys.server), 1)
    (*_, packet) = sent_to(net, 10, "exchange")
    later = {"attempt": 1001, "number": 10**7, "exchange": 10**6, "index": 10**6}
    answer = net.sites[10].handle(again(packet, keys.server, **later))
    assert unpack(answer, MOST, keys.server)[0].kind == "exchange"


def test_a_packet_changed_in_any_byte_is_refused(keys):
    """Of a request at the site, and of its reply at the server."""
    held = []

    def script(node, packet, net):
        if held or (node == 10 and read(packet)[0].round == 1):
            held.append(packet)
            return None
        return net.sites[node].handle(packet)

    net = signed(keys, script=script)
    server = server_of(JOB, net, seal=keys.server)
    state, _ = server.start()
    exchanges = server.exchanges
    header = exchanges.roster.header("exchange", round=1, exchange=2)
    question = exchanges.question(header, state.server, (1, 0), 0, [0, 1])
    exchanges.exchange(question, lambda client: (1, 0))
    packet, site = held[0], net.sites[10]
    for changed in _changed(packet):
        refused = read(site.handle(changed))[0].info or {}
        assert refused["reason"] in ("garbage", "signature", "version")
    reply = site.handle(packet)
    assert unpack(reply, MOST, keys.server)[0].kind == "exchange"
    for changed in _changed(reply):
        with pytest.raises(RefusedError, match="garbage|signature|version"):
            unpack(changed, MOST, keys.server)


def _changed(packet: bytes):
    assert len(packet) < 1500
    for place in range(len(packet)):
        flipped = packet[place] ^ (1 << (place % 8))
        yield packet[:place] + bytes([flipped]) + packet[place + 1 :]


def test_sides_with_and_without_keys_do_not_talk(keys):
    for ours, theirs in ((CHECKSUM, keys.server), (keys.sites[0], CHECKSUM)):
        packet = pack(Header("hello", "f", "s", "", EVERYONE, 1, 1), seal=theirs)
        with pytest.raises(RefusedError, match="keys"):
            unpack(packet, MOST, ours)


def test_keys_are_made_as_ssh_keygen_does(tmp_path):
    make_key_pair(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    shown = subprocess.run(
        ["ssh-keygen", "-y", "-f", tmp_path / "own"], capture_output=True, check=True
    )
    assert shown.stdout.split()[:2] == (tmp_path / "own.pub").read_bytes().split()


def test_one_key_for_two_clients_is_told(keys):
    twice = (keys.files.peers[0], keys.files.peers[1], keys.files.peers[0])
    with pytest.raises(InvalidInputError, match="clients 0 and 2 have the same key"):
        server_seal(KeyFiles(keys.files.private, twice))
