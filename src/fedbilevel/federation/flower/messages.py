"""A packet as a Flower message, piece by piece, and back; the name of a node's key.

Flower stores and sends a message as objects, with a request for each. A packet is cut
into pieces of 4 MiB, an object each, that are made when they are sent and put where
they belong when they come: besides the packet itself no side ever holds more than a
few of them, and no request has more than Protocol Buffers can say, 2 GiB.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_object_id

from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import Carried, sha256_of

KIND = "train"  # the message type; what a packet is for stands in its header
PIECE = 1 << 22  # bytes of all pieces of a packet but the last
_RECORD, _INDEX, _WHOLE, _OF = "packet", "piece", "bytes", "of"
# A packet begins with its seal, which is over all of it: no other begins like it.
_BEGINNING = 256


class _Piece(ConfigRecord):
    """A piece of a packet that is made whenever it is asked for.

    It holds its number, the bytes of its packet, and the name of the packet. So pieces
    of two packets always differ, however alike the packets are.
    """

    def __init__(self, packet: bytes, index: int) -> None:
        super().__init__()
        self.__dict__ |= {"_packet": packet, "_index": index}

    def deflate(self) -> bytes:
        """Return the bytes that travel."""
        packet, index = self.__dict__["_packet"], self.__dict__["_index"]
        held = {_RECORD: packet[index * PIECE : (index + 1) * PIECE], _INDEX: index}
        held |= {_WHOLE: len(packet), _OF: sha256_of([packet[:_BEGINNING]])}
        return ConfigRecord(held).deflate()

    @functools.cached_property
    def object_id(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The name of the object, which is computed once."""
        return get_object_id(self.deflate())


def _count(length: int) -> int:
    """Return how many pieces a packet has; an empty one has one, too."""
    return max(-(-length // PIECE), 1)


def as_content(packet: bytes) -> RecordDict:
    """Wrap a packet; its pieces are made when they are sent."""
    pieces = [_Piece(packet, index) for index in range(_count(len(packet)))]
    # Flower wants names; they are sorted as the pieces are.
    return RecordDict({f"{_RECORD}{n:09}": piece for n, piece in enumerate(pieces)})


class Assembly:
    """Puts the pieces of a packet together, each where it belongs, in their order.

    `names` are those of the pieces that were announced, and `largest` are the most
    bytes that they may have together. Memory is allocated for received pieces, not for
    announced ones, and pieces are not moved. Anything but the next piece of the same
    packet makes all of it refused.
    """

    def __init__(self, names: Sequence[str], largest: int) -> None:
        self.names, self.largest, self.came = names, largest, 0
        self._packet, self._of = bytearray(), (0, b"")

    def _add(self, record: Mapping[str, Any]) -> None:
        """Put the next piece where it belongs, or refuse it."""
        piece, index, whole, name = _read(record)
        if self.came == 0:
            # A packet that is too long, or has not the pieces announced.
            if not 0 <= whole <= self.largest:
                raise RefusedError(
                    "oversized", f"{whole} bytes, at most {self.largest} expected"
                )
            if _count(whole) != len(self.names):
                due = f"{whole} bytes, which have {_count(whole)}"
                raise RefusedError("pieces", f"{len(self.names)} pieces for {due}")
            self._of = whole, name
        if (whole, name) != self._of:
            raise RefusedError("pieces", f"piece {self.came} is of another packet")
        if index != self.came:
            raise RefusedError("pieces", f"piece {index} came where {self.came} is due")
        due = min(PIECE, whole - index * PIECE)
        if len(piece) != due:
            raise RefusedError(
                "pieces", f"piece {index} has {len(piece)} bytes where {due} are due"
            )
        self._packet += piece
        self.came += 1

    def filled(self, pull: Callable[[str], Mapping[str, Any]]) -> Carried:
        """Pull what is missing; return the packet, or why it is refused.

        Where `pull` raises, another call continues at the same piece.
        """
        try:
            for name in self.names[self.came :]:
                self._add(pull(name))
            if not self.names:
                raise RefusedError("pieces", "0 came of 0")
            return self._packet
        except RefusedError as refusal:
            return refusal


def _read(record: Mapping[str, Any]) -> tuple[bytes, int, int, bytes]:
    """Return a piece, its number, the bytes of the whole, and the whole's name."""
    names = {_RECORD: bytes, _INDEX: int, _WHOLE: int, _OF: bytes}
    if any(type(record.get(name)) is not kind for name, kind in names.items()):
        raise RefusedError(
            "pieces",
            "something else than a piece of a packet; install the same version of "
            "fedbilevel on both sides",
        )
    return record[_RECORD], record[_INDEX], record[_WHOLE], record[_OF]


def record_in(content: bytes) -> Mapping[str, Any]:
    """Return the record that an object holds; of anything else an empty one."""
    try:
        return ConfigRecord.inflate(content)
    except Exception:  # whatever it is, it is no piece, and refused as such
        return {}


def packet_of(message: Message, largest: int) -> Carried:
    """Return the packet of a message that Flower has put together, or its refusal."""
    records = message.content.config_records
    return Assembly(sorted(records), largest).filled(records.__getitem__)


def piece_objects(tree: ObjectTree) -> list[str]:
    """Return the names of the objects of a message that hold pieces of its packet.

    The others say how it is wrapped, which both sides know: they need no request.
    """
    return [piece.object_id for records in tree.children for piece in records.children]


def fingerprint(public_key: bytes) -> str:
    """Return a name for a public key, as Flower writes it."""
    return sha256_of([public_key]).hex()


def push_objects(
    objects: Mapping[str, InflatableObject],
    wanted: Iterable[str],
    push: Callable[[str, bytes], None],
) -> None:
    """Send those objects of messages that are wanted, the pieces of packets last.

    A receiver with all pieces confirms the message, and Flower deletes all of it,
    together with unsent parts: sending those would fail. Of pieces one is made at a
    time.
    """
    asked = set(wanted)
    names = [name for name in objects if name in asked]
    pieces = [name for name in names if isinstance(objects[name], ConfigRecord)]
    wrappings = [name for name in names if name not in set(pieces)]
    content = ((name, objects[name].deflate()) for name in wrappings)
    inflatable_utils.push_object_contents_from_iterable(content, push)
    for name in pieces:
        push(name, objects[name].deflate())
