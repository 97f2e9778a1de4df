"""A packet as a Flower message, and back; the name of a node's key."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_utils import (
    push_object_contents_from_iterable,
)

__all__ = [
    "KIND",
    "as_content",
    "fingerprint",
    "packet_in",
    "packet_object",
    "packet_of",
    "push_objects",
]

KIND = "train"  # the message type; what a packet is for stands in its header
_RECORD = "packet"


def as_content(packet: bytes) -> RecordDict:
    """Wrap a packet.

    A record of bytes is 3 objects in Flower's store, one request each; an array is 5.
    """
    return RecordDict({_RECORD: ConfigRecord({_RECORD: packet})})


def packet_of(message: Message) -> bytes:
    """Unwrap a packet; whatever is no packet of ours is an empty one, and refused."""
    records = message.content.config_records
    return _bytes_of(records[_RECORD]) if _RECORD in records else b""


def packet_object(tree: ObjectTree) -> str:
    """Return the name of the one object of a message that holds its packet.

    The others say how it is wrapped, which both sides know: they need no request.
    """
    while tree.children:
        tree = tree.children[0]
    return tree.object_id


def packet_in(content: bytes) -> bytes:
    """Unwrap the object that holds a packet; of anything else an empty one."""
    try:
        return _bytes_of(ConfigRecord.inflate(content))
    except Exception:  # whatever it is, it is no packet, and refused as such
        return b""


def fingerprint(public_key: bytes) -> str:
    """Return a name for a public key, as Flower writes it."""
    return hashlib.sha256(public_key).hexdigest()


def push_objects(
    objects: Mapping[str, InflatableObject],
    wanted: Iterable[str],
    push: Callable[[str, bytes], None],
) -> None:
    """Send those objects of messages that are wanted, the packets last.

    Whoever has the packet confirms the message, and Flower deletes all of it, together
    with what is still to come: sending that would fail.
    """
    names = list(wanted)
    packets = [name for name in names if isinstance(objects[name], ConfigRecord)]
    wrappings = [name for name in names if name not in packets]
    for part in (wrappings, packets):
        push_object_contents_from_iterable(
            ((name, objects[name].deflate()) for name in part), push
        )


def _bytes_of(record: ConfigRecord) -> bytes:
    value = record.get(_RECORD)
    return value if isinstance(value, bytes) else b""
