"""Packets in pieces: put together as they were, or refused by name; held once."""

import hashlib
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity

from fedbilevel.federation.flower import messages
from fedbilevel.federation.flower.messages import (
    Assembly,
    as_content,
    packet_of,
    piece_objects,
    push_objects,
    record_in,
)
from fedbilevel.federation.flower.node import _Mailbox
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import EVERYONE, Header, pack, unpack, unpack_tree
from fedbilevel.runtime import execute
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import Loopback, server_of, site_of

SMALL = 16  # bytes of a piece
HEADER = Header("exchange", "f1", "settings", "algorithm", EVERYONE, 1)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Say who sends messages, as Flower wants it."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def small(monkeypatch):
    """Let pieces be short."""
    monkeypatch.setattr(messages, "PIECE", SMALL)


def contents_of(packet: bytes) -> tuple[ObjectTree, dict[str, bytes]]:
    """Return the tree of a message, and what is pushed of it."""
    message = Message(as_content(packet), 7, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    pushed: dict[str, bytes] = {}
    objects = get_all_nested_objects(message)
    push_objects(objects, objects, pushed.__setitem__)
    return get_object_tree(message), pushed


def pieces_of(packet: bytes) -> list[bytes]:
    tree, pushed = contents_of(packet)
    return [pushed[name] for name in piece_objects(tree)]


def joined(pieces: list[bytes], largest: int = 1000):
    assembly = Assembly([str(k) for k in range(len(pieces))], largest)
    found = assembly.filled(lambda name: record_in(pieces[int(name)]))
    if isinstance(found, RefusedError):
        raise found
    return found


@pytest.mark.parametrize("length", [0, 1, SMALL - 1, SMALL, SMALL + 1, 5 * SMALL])
def test_pieces_make_the_packet(small, length):
    packet = bytes(range(length))
    pieces = pieces_of(packet)
    assert len(pieces) == max(1, -(-length // SMALL))
    assert joined(pieces) == packet


def test_pieces_that_are_alike_are_objects_of_their_own(small):
    tree, _ = contents_of(bytes(3 * SMALL))
    other, _ = contents_of(bytes(4 * SMALL))
    names = piece_objects(tree)
    assert len(set(names)) == 3 and not set(names) & set(piece_objects(other))


def test_the_name_of_an_object_is_the_digest_of_its_content(small):
    """Flower's store refuses anything else."""
    tree, pushed = contents_of(b"x" * 40)
    assert {name: hashlib.sha256(one).hexdigest() for name, one in pushed.items()} == {
        name: name for name in pushed
    }
    assert list(pushed)[-3:] == piece_objects(tree)  # the packet is sent last


def changed(content: bytes, **more) -> bytes:
    record = ConfigRecord.inflate(content)
    return ConfigRecord({**record, **more}).deflate()


FIRST, OTHER = b"a" * 40, b"b" * 40
WRONG = {
    "missing": (lambda p, o: p[:2], "pieces: 2 pieces for 40 bytes, which have 3"),
    "none": (lambda p, o: [], "pieces: 0 came of 0"),
    "too many": (lambda p, o: [*p, p[0]], "4 pieces for 40 bytes, which have 3"),
    "repeated": (lambda p, o: [p[0], p[0], p[2]], "piece 0 came where 1 is due"),
    "reordered": (lambda p, o: [p[0], p[2], p[1]], "piece 2 came where 1 is due"),
    "later first": (lambda p, o: [p[1], p[0], p[2]], "piece 1 came where 0 is due"),
    "foreign": (lambda p, o: [p[0], o[1], p[2]], "piece 1 is of another packet"),
    "long": (
        lambda p, o: [p[0], changed(p[1], packet=b"a" * 17), p[2]],
        "piece 1 has 17 bytes where 16 are due",
    ),
    "short": (
        lambda p, o: [p[0], changed(p[1], packet=b""), p[2]],
        "piece 1 has 0 bytes where 16 are due",
    ),
    "huge": (
        lambda p, o: [changed(p[0], bytes=2**60), *p[1:]],
        f"oversized: {2**60} bytes, at most 1000 expected",
    ),
    "negative": (lambda p, o: [changed(p[0], bytes=-1), *p[1:]], "oversized: -1"),
    "growing": (
        lambda p, o: [p[0], changed(p[1], bytes=41), p[2]],
        "piece 1 is of another packet",
    ),
    "no piece": (lambda p, o: [p[0], b"", p[2]], "something else than a piece"),
    "no number": (
        lambda p, o: [changed(p[0], piece=0.0), *p[1:]],
        "something else than a piece",
    ),
    "older": (
        lambda p, o: [ConfigRecord({"packet": FIRST}).deflate()],
        "install the same version",
    ),
}


def wrong(name: str) -> tuple[list[bytes], str]:
    make, told = WRONG[name]
    return make(pieces_of(FIRST), pieces_of(OTHER)), told


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_packet_is_refused_by_name(small, name):
    pieces, told = wrong(name)
    with pytest.raises(RefusedError, match=told):
        joined(pieces)


@pytest.mark.parametrize("name", WRONG)
def test_both_sides_go_on_with_the_refusal(small, name):
    """It stands in the place of the packet, and the message is done with."""
    pieces, told = wrong(name)
    names = [str(k) for k in range(len(pieces))]
    held = dict(zip(names, pieces, strict=True))
    reply = Assembly(names, 1000)
    found = reply.filled(lambda name: record_in(held[name]))
    assert isinstance(found, RefusedError) and told in str(found)
    tree = ObjectTree(object_id="message", children=[ObjectTree(object_id="records")])
    tree.children[0].children.extend(ObjectTree(object_id=one) for one in names)
    message = SimpleNamespace(metadata=SimpleNamespace(run_id=1))
    confirmed: list[Any] = []
    calls = (0, lambda: (message, tree), *[None] * 3)
    calls += (lambda run, one: held[one], None, lambda *one: confirmed.append(one))
    _, found = _Mailbox(calls, 1000)._next()  # type: ignore[misc]
    assert isinstance(found, RefusedError) and told in str(found)
    assert confirmed == [(1, "message")]


def test_a_flower_process_hands_over_all_records(small):
    records = {f"packet{k}": record_in(one) for k, one in enumerate(pieces_of(FIRST))}
    message: Any = SimpleNamespace(content=RecordDict(records))  # type: ignore[arg-type]
    assert packet_of(message, 40) == FIRST
    assert isinstance(packet_of(message, 39), RefusedError)


def test_a_reply_of_which_some_is_on_its_way_goes_on_there(small):
    pieces, asked = pieces_of(FIRST), []
    reply = Assembly(["0", "1", "2"], 1000)

    def pull(name: str):
        asked.append(name)
        if asked == ["0", "1"]:
            raise TimeoutError
        return record_in(pieces[int(name)])

    with pytest.raises(TimeoutError):
        reply.filled(pull)
    assert reply.filled(pull) == FIRST
    assert asked == ["0", "1", "1", "2"]


def peak_of(function) -> tuple[Any, int]:
    """Return what a function returns, and the bytes it took beyond what was there."""
    tracemalloc.start()
    try:
        made = function()
        return made, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_no_side_holds_a_packet_twice():
    """Beside the leaves there is the packet, and a few pieces of it."""
    leaf = np.arange(16 << 20, dtype=np.float32)  # 64 MiB, 16 pieces
    length, few = leaf.nbytes, 8 * messages.PIECE
    packet, taken = peak_of(lambda: pack(HEADER, [leaf]))
    assert length < taken < length + few

    def send() -> int:
        message = Message(as_content(packet), 7, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        objects, sizes = get_all_nested_objects(message), []
        push_objects(objects, objects, lambda name, one: sizes.append(len(one)))
        return len(sizes)

    count, taken = peak_of(send)
    assert count == 2 + 17 and taken < few  # the header makes one more
    pieces = pieces_of(packet)
    came, taken = peak_of(lambda: joined(pieces, len(packet)))
    assert length < taken < length + few

    def read():
        _, listed, body = unpack(came, len(packet))
        return unpack_tree(listed, body, leaf)

    found, taken = peak_of(read)
    assert taken < few + length // 4 and np.array_equal(found, leaf)  # flags: finite?


@pytest.mark.slow
def test_a_site_lets_go_of_what_nobody_waits_for(monkeypatch):
    """While it works it does not have its last reply any more."""
    algorithm = case_of("momentum-local-sgd").algorithm
    job = quadratic_job(algorithm, quadratic_data(2))
    net = Loopback({10 + k: site_of(job, k) for k in range(2)})
    site, found = net.sites[10], []
    work = site.work.exchange

    def watched(*given):
        found.append(site._answered)
        return work(*given)

    monkeypatch.setattr(site.work, "exchange", watched)
    execute(server_of(job, net), 3)
    assert found == [(None, b"")] * len(found) and len(found) >= 3
    # And a short leaf that it holds does not hold the packet that it came in.
    assert site._held and all(leaf.base is None for leaf in site._held.values())
