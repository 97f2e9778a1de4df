"""Packets that were tampered with are refused with a reason, and change nothing."""

import dataclasses
import hashlib
import json
from collections import Counter

import jax
import numpy as np
import pytest

from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import (
    CHECKSUM,
    START_BYTES,
    Header,
    pack,
    unpack,
    unpack_start,
    unpack_tree,
)
from fedbilevel.runtime import execute, keys
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import FEDERATION, Loopback, server_of, site_of

BSGVRM = case_of("local-bsgvrm").algorithm
REASONS = {
    "algorithm",
    "attempt",
    "client",
    "damaged",
    "dtype",
    "federation",
    "garbage",
    "jump",
    "not-finite",
    "oversized",
    "phase",
    "replayed",
    "settings",
    "shape",
    "truncated",
    "unknown",
    "version",
}


def leaves_of(packet):
    header, listed, body = unpack(packet, 1 << 30)
    return header, unpack_start(listed, body)


def flipped(packet, draw):
    """Change some bytes."""
    changed = bytearray(packet)
    # Different places: the same one twice could change nothing.
    count = draw.integers(1, 5)
    for place in draw.choice(len(packet), count, replace=False):
        changed[place] ^= int(draw.integers(1, 256))
    return bytes(changed)


def cut(packet, draw):
    return packet[: draw.integers(0, len(packet))]


def garbage(packet, draw):
    return draw.bytes(draw.integers(0, 2 * len(packet)))


def disguised(packet, draw):
    """Garbage behind a frame that fits."""
    return packet[:4] + draw.bytes(draw.integers(0, 200))


def longer(packet, draw):
    return packet + draw.bytes(draw.integers(1, 50))


def oversized(packet, draw):
    header, leaves = leaves_of(packet)
    return pack(header, [*leaves, np.zeros(int(draw.integers(1, 40)), leaves[0].dtype)])


def other_version(packet, draw):
    version = [v for v in range(256) if v != packet[3]][draw.integers(0, 255)]
    return packet[:3] + bytes([version]) + packet[4:]


def other_shape(packet, draw):
    header, leaves = leaves_of(packet)
    place = draw.integers(0, len(leaves))
    leaves[place] = np.concatenate([leaves[place].ravel(), [1.0]])
    return pack(header, leaves)


def other_type(packet, draw):
    header, leaves = leaves_of(packet)
    place = draw.integers(0, len(leaves))
    kind = ["float32", "float16", "int64", "complex128"][draw.integers(0, 4)]
    leaves[place] = leaves[place].astype(kind)
    return pack(header, leaves)


def not_finite(packet, draw):
    header, leaves = leaves_of(packet)
    place = draw.integers(0, len(leaves))
    leaf = leaves[place].copy()
    leaf.flat[draw.integers(0, leaf.size)] = [np.nan, np.inf, -np.inf][
        draw.integers(0, 3)
    ]
    leaves[place] = leaf
    return pack(header, leaves)


def other_header(packet, draw):
    """Say something else in one field of the header, with a checksum that fits."""
    header, leaves = leaves_of(packet)
    names = ["federation", "algorithm", "settings", "client", "stage", "phase", "name"]
    name = names[draw.integers(0, 7)]
    value = getattr(header, name)
    other = value + 1 + int(draw.integers(0, 5)) if isinstance(value, int) else "else"
    return pack(dataclasses.replace(header, **{name: other}), leaves)


def wrong_kind_of_field(packet, draw):
    """Put another type into the header."""
    length = int.from_bytes(packet[4:8], "big")
    rest = packet[START_BYTES + CHECKSUM.size :]
    head = json.loads(rest[:length])
    name = sorted(head)[draw.integers(0, len(head))]
    head[name] = [None, -1, 1.5, [], {"a": 1}, "x" * 50, True, 2**60][
        draw.integers(0, 8)
    ]
    if name == "info" and head[name] in (None, {"a": 1}):
        head[name] = 3
    return framed(packet, json.dumps(head).encode(), rest[length:])


def framed(packet, text, body):
    length = len(text).to_bytes(4, "big")
    digest = hashlib.sha256(length + text + body).digest()
    return packet[:4] + length + digest + text + body


MUTATIONS = [
    flipped,
    cut,
    garbage,
    disguised,
    longer,
    oversized,
    other_version,
    other_shape,
    other_type,
    not_finite,
    other_header,
    wrong_kind_of_field,
]


@pytest.fixture(scope="module")
def federation():
    """A federation of two in round three: a message to client 0, and what it replies.

    The site that is attacked has not seen the message yet, its twin has answered it.
    """
    job = quadratic_job(BSGVRM, quadratic_data(2))
    net = Loopback({10 + k: site_of(job, k) for k in range(2)})
    execute(server_of(job, net), 3)
    pairs = [
        (packet, answer)
        for node, packet, answer in net.sent
        if node == 10 and unpack(packet, 1 << 30)[0].kind == "exchange"
    ]
    last = pairs[-1][0]

    def script(node, packet, net):
        net.lost = net.lost or packet == last
        return None if net.lost and node == 10 else net.sites[node].handle(packet)

    halted = Loopback({10 + k: site_of(job, k) for k in range(2)}, script)
    halted.lost = False
    execute(server_of(job, halted), 3)
    return job, halted, *pairs[-1]


def test_a_site_refuses_5000_tampered_messages(federation):
    _, net, message, reply = federation
    site = net.sites[10]
    before = jax.tree.map(np.copy, site.checkpoints[FEDERATION].kept)
    draw, seen = np.random.default_rng(0), Counter()
    for number in range(5000):
        tampered = MUTATIONS[number % len(MUTATIONS)](message, draw)
        answer, _, _ = unpack(site.handle(tampered), 1 << 30)
        assert answer.kind == "refused" and answer.info, (number, answer)
        seen[answer.info["reason"]] += 1
    after = site.checkpoints[FEDERATION].kept
    assert before.keys() == after.keys()
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert set(seen) <= REASONS and len(seen) >= 10, seen
    # It still answers, and with the same leaves.
    assert unpack(site.handle(message), 1 << 30)[2] == unpack(reply, 1 << 30)[2]


@pytest.mark.slow
def test_a_server_refuses_1500_tampered_replies(federation):
    job, net, _, old_reply = federation
    draw, seen = np.random.default_rng(1), Counter()

    def replayed(answer, draw):
        return old_reply

    how, named = replayed, []

    def script(node, packet, one):
        answer = one.sites[node].handle(packet)
        tampers = node == 10 and unpack(packet, 1 << 30)[0].kind == "exchange"
        return how(answer, draw) if tampers else answer

    net = Loopback(net.sites, script)
    server = server_of(job, net, attempt=2, left_out=named.append)
    exchanges, start = server.exchanges, server.blank().server
    header = exchanges.roster.header("exchange", round=1, exchange=1)
    question = exchanges.question(header, start, (keys.ROUNDS, 0), 0, [0, 1])
    for number in range(1500):
        how = [*MUTATIONS, replayed][number % (len(MUTATIONS) + 1)]
        named.clear()
        taken = exchanges.exchange(question, lambda client: (0, 0))
        # What the model is made of is the reply of the other one alone.
        assert set(taken.taken) == {1}, (number, how)
        assert [entry["client"] for entry in named] == [0]
        seen[named[0]["reason"]] += 1
    assert set(seen) <= REASONS and len(seen) >= 7, seen


def test_a_tree_survives_the_wire():
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": np.int32(4), "c": np.zeros(0)}
    tree = jax.tree.map(np.asarray, tree)
    header = Header("exchange", "e", "a", "t", 1, 1, info={"more": [1, "two"]})
    packet = pack(header, jax.tree.leaves(tree))
    back, listed, body = unpack(packet, len(packet))
    assert back == header
    jax.tree.map(np.testing.assert_array_equal, tree, unpack_tree(listed, body, tree))
    with pytest.raises(RefusedError, match="oversized"):
        unpack(packet, len(packet) - 1)


@pytest.mark.parametrize(
    ("change", "reason"), [(b"\0", "oversized"), (b"", None), (None, "truncated")]
)
def test_a_tree_has_neither_bytes_too_many_nor_too_few(change, reason):
    tree = {"a": np.arange(3.0), "b": np.ones((2, 1), np.float32)}
    listed = [["<f8", [3], None], ["<f4", [2, 1], None]]
    body = b"".join(leaf.tobytes() for leaf in tree.values())
    body = body[:-1] if change is None else body + change
    if reason is None:
        found = unpack_tree(listed, body, tree)
        assert all(np.array_equal(found[name], tree[name]) for name in tree)
        return
    with pytest.raises(RefusedError, match=reason):
        unpack_tree(listed, body, tree)
