"""A packet as a Flower message, and back."""

from flwr.app import ConfigRecord, Message, RecordDict

__all__ = ["KIND", "as_content", "packet_of"]

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
    value = records[_RECORD].get(_RECORD) if _RECORD in records else None
    return value if isinstance(value, bytes) else b""
