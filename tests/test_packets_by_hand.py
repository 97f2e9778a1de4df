"""Packets, who is asked again, waited for or left out, and which request is newer."""

import json
import struct
from typing import Any

import numpy as np
import pytest

from fedbilevel.errors import DamagedFileWarning
from fedbilevel.federation import signatures as signing
from fedbilevel.federation.checkpoints import Newest, SiteCheckpoints
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import (
    CHECKSUM,
    EVERYONE,
    Header,
    in_mask,
    mask_of,
    pack,
    unpack,
    unpack_start,
    unpack_tree,
)

ASKED = Header("measure", "f", "s", "a", EVERYONE, 1, exchange=5)


def refusal(function, *given) -> str:
    try:
        function(*given)
    except RefusedError as error:
        return str(error)
    return ""


def asked(**changes: Any) -> Header:
    return Header(**{**vars(ASKED), **changes})


# Packets.


def raw(header: dict, listed=(), version=6, magic=b"FBL", body=b"") -> bytes:
    """Return a packet with a right checksum, whatever its header says."""
    text = json.dumps({**header, "leaves": list(listed)}).encode()
    length = struct.pack(">I", len(text))
    mark = CHECKSUM.mark([length, text, body])
    return magic + bytes([version]) + length + mark + text + body


def test_a_packet_is_put_together_as_it_is_written_down():
    leaf = np.asarray([1.5, 2.5], np.float32)
    packet = pack(ASKED, [leaf])
    assert packet[:4] == b"FBL\x06"
    length = int.from_bytes(packet[4:8], "big")
    head = json.loads(packet[40 : 40 + length])
    assert head == {**vars(ASKED), "leaves": [["<f4", [2], None]]}
    assert list(head) == sorted(head)
    assert packet[40 + length :] == struct.pack("<2f", 1.5, 2.5)
    assert packet[8:40] == CHECKSUM.mark([packet[4:8], packet[40:]])
    assert unpack(packet, len(packet))[0] == ASKED


def test_a_leaf_that_is_known_is_named_and_not_sent():
    leaves = [np.arange(3.0), np.arange(2.0), np.zeros((0, 2))]
    name = "known"
    listed = [["<f8", [3], name], ["<f8", [2], None], ["<f8", [0, 2], None]]
    body, held = leaves[1].tobytes(), {name: leaves[0]}
    found = unpack_tree(listed, body, leaves, held)
    assert found[0] is leaves[0] and found[1].tolist() == [0.0, 1.0]
    assert found[2].shape == (0, 2)
    told = "unknown: refers to a leaf that is not held here"
    for no in (None, {}, {"other": leaves[0]}):
        assert refusal(unpack_tree, listed, body, leaves, no) == told
    told = "shape: refers to a leaf of another shape"
    assert refusal(unpack_tree, listed, body, leaves, {name: leaves[1]}) == told


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (["<f8", [2]], "garbage: leaf listed as"),
        ("<f8", "garbage: leaf listed as"),
        (["<f4", [2], None], "dtype: '<f4' where <f8 is expected"),
        (["<f8", [3], None], "shape: [3] where [2] is expected"),
        (["<f8", [2], 7], "garbage: leaf refers to 7"),
    ],
)
def test_a_leaf_is_listed_as_it_is_expected(entry, told):
    assert refusal(unpack_tree, [entry], bytes(16), [np.zeros(2)]).startswith(told)


def test_a_tree_has_its_leaves_and_finite_ones():
    like, listed = [np.zeros(1)], [["<f8", [1], None]]
    told = refusal(unpack_tree, [], b"", like)
    assert told == "shape: 0 leaves, 1 expected"
    told = refusal(unpack_tree, listed, bytes(9), like)
    assert told == "oversized: 1 bytes too many"
    told = refusal(unpack_tree, listed, bytes(7), like)
    assert told == "truncated: 7 bytes of leaves are too few"
    nan = struct.pack("<d", float("nan"))
    assert (
        refusal(unpack_tree, listed, nan, like) == "not-finite: holds NaN or infinity"
    )
    (found,) = unpack_tree(listed, nan, like, finite=False)
    assert np.isnan(found).all()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (["<f2", [1], None], ""),
        (["<f8", [0], None], ""),
        (["<f8", [1] * 32, None], ""),
        (["<f8", [1] * 33, None], "shape"),
        (["<f8", [-1], None], "shape"),
        (["<f8", [True], None], "shape"),
        (["<f8", [2**40, 0], None], ""),
        (["<f8", [2**40 + 1, 0], None], "shape"),
        (["<f8", [2**40, 0, 2], None], "shape"),
        (["<i8", [1], None], "garbage"),
        (["<f8", [1], "held"], "garbage"),
        (["<f8", 1, None], "garbage"),
    ],
)
def test_a_start_has_shapes_that_can_be(entry, reason):
    itemsize = int(entry[0][-1])
    sizes = entry[1] if isinstance(entry[1], list) else [entry[1]]
    count = int(np.prod([float(n) for n in sizes]))
    body = bytes(itemsize * count) if 0 <= count < 9 else b""
    assert refusal(unpack_start, [entry], body).partition(":")[0] == reason


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"index": 2**31 - 1}, True),
        ({"index": 2**31}, False),
        ({"client": 2**32 - 1}, True),
        ({"client": 2**32}, False),
        ({"number": 2**53 - 1}, True),
        ({"number": 2**53}, False),
        ({"number": -1}, False),
        ({"number": 1.0}, False),
        ({"number": True}, False),
        ({"name": "n" * 128}, True),
        ({"name": "n" * 129}, False),
        ({"name": 3}, False),
        ({"addressees": "f" * 400}, True),
        ({"addressees": "f" * (2**14 + 1)}, False),
        ({"info": {}}, True),
        ({"info": []}, False),
        ({"more": 1}, False),
    ],
)
def test_fields_of_a_header_are_in_range(change, taken):
    told = refusal(unpack, raw({**vars(ASKED), **change}), 1 << 20)
    assert told.startswith("garbage: header") is not taken


def test_as_many_clients_are_named_as_a_mask_may_have():
    """Of 2^16 clients, the most under masks, each may be asked."""
    packet = pack(asked(addressees=mask_of(range(2**16))))
    assert unpack(packet, 1 << 20)[0].addressees == "f" * 2**14


def test_what_does_not_begin_like_a_packet_is_refused():
    good = raw(vars(ASKED))
    assert refusal(unpack, good, len(good)) == ""
    told = refusal(unpack, good, len(good) - 1)
    assert told == f"oversized: {len(good)} bytes, at most {len(good) - 1} expected"
    for wrong in (good[:39], raw(vars(ASKED), magic=b"FBX"), b""):
        told = "garbage: does not start like a packet"
        assert refusal(unpack, wrong, 1 << 20) == told
    told = refusal(unpack, raw(vars(ASKED), version=7), 1 << 20)
    assert told.startswith("version: speaks protocol 7, this side 6; install")
    assert refusal(unpack, good[:40], 1 << 20).startswith("damaged: checksum")
    long = struct.pack(">I", 1)
    empty = good[:4] + long + CHECKSUM.mark([long])
    told = refusal(unpack, empty, 1 << 20)
    assert told == "garbage: announces a header of 1 bytes"
    carried = RefusedError("pieces", "lost")
    assert refusal(unpack, carried, 1 << 20) == str(carried)


def test_a_mask_has_a_bit_for_each_client():
    assert (mask_of([]), mask_of([0, 2, 2]), mask_of([4])) == ("0", "5", "10")
    assert [k for k in range(9) if in_mask(k, "15")] == [0, 2, 4]
    assert not in_mask(0, "odd") and not in_mask(0, "")


def test_who_signs_is_who_speaks():
    private = signing.ec.generate_private_key(signing.ec.SECP384R1())
    of = {3: private.public_key(), EVERYONE: private.public_key()}
    writes = signing.Signatures(3, private, {}, writes=b"up", reads=b"down")
    reads = signing.Signatures(EVERYONE, private, of, writes=b"down", reads=b"up")
    assert writes.size == 100 and writes.mark([b"x"])[:4] == bytes([0, 0, 0, 3])
    packet = pack(asked(client=3), seal=writes)
    assert unpack(packet, 1 << 20, reads)[0].client == 3
    told = refusal(unpack, pack(asked(client=4), seal=writes), 1 << 20, reads)
    assert told == "signature: 3 signed what says it is of 4"
    for other in (
        signing.Signatures(4, private, {}, writes=b"up", reads=b"down"),  # unknown
        signing.Signatures(3, private, {}, writes=b"down", reads=b"down"),  # purpose
    ):
        told = refusal(unpack, pack(asked(client=3), seal=other), 1 << 20, reads)
        assert told.startswith("signature: not signed with a key that is known here")


# Checkpoints, and the newest request.

NEWEST = Newest(attempt=3, number=10, exchange=20, round=5, index=7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"number": 10}, "replayed"),
        ({"attempt": 2}, "attempt"),
        ({"attempt": 4, "number": 0}, ""),  # of a new start they count anew
        ({"attempt": 10_003, "number": 1}, ""),
        ({"attempt": 10_004, "number": 1}, "jump"),
        ({"number": 10 + 2**28}, ""),
        ({"number": 11 + 2**28}, "jump"),
        ({"attempt": 4, "number": 2**28}, ""),
        ({"attempt": 4, "number": 1 + 2**28}, "jump"),
        ({"exchange": 20 + 2**28}, ""),
        ({"exchange": 21 + 2**28}, "jump"),
        ({"round": 5 + 2**28}, ""),
        ({"round": 6 + 2**28}, "jump"),
        ({"index": 7 + 2**28}, ""),
        ({"index": 8 + 2**28}, "jump"),
    ],
)
def test_a_request_is_newer_and_not_from_the_far_future(changes, reason):
    header = asked(**{"attempt": 3, "number": 11, **changes})
    assert refusal(NEWEST.check, header).partition(":")[0] == reason


def test_counters_never_fall():
    found = NEWEST.after(asked(attempt=4, number=1, exchange=2, round=9, index=1))
    assert found == Newest(attempt=4, number=1, exchange=20, round=9, index=7)


def test_checkpoints_from_the_oldest_that_may_matter_are_kept(tmp_path):
    start: Any = {"own": np.zeros(2)}
    held = SiteCheckpoints(start, tmp_path, "f", 4)
    assert not held.found
    for exchange, oldest in ((1, 0), (2, 0), (3, 2)):
        held.put(exchange, {"own": np.full(2, float(exchange))}, oldest)  # type: ignore[arg-type]
    assert sorted(held.kept) == [2, 3]
    assert held.at(0) is held.start and held.at(1) is None
    held.answered(asked(number=8))
    again = SiteCheckpoints(start, tmp_path, "f", 4)
    assert again.found and again.newest == Newest(1, 8, 5, 0, 0)
    third: Any = again.at(3)
    assert sorted(again.kept) == [2, 3] and third["own"].tolist() == [3.0, 3.0]
    assert (tmp_path / "f.npz").stat().st_mode & 0o777 == 0o600
    with pytest.warns(DamagedFileWarning, match="the state of another client"):
        other = SiteCheckpoints(start, tmp_path, "f", 5)
    assert other.found and other.kept == {} and other.newest == Newest()
    # Who keeps nothing stands where it began, whatever is asked.
    nothing: Any = SiteCheckpoints({}, None, "f", 4)  # type: ignore[arg-type]
    assert nothing.at(9) is nothing.start
