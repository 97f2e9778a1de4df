"""Packets between server and site: a header, and one flat packed array.

    magic "FBL" and the protocol version     4 bytes
    length of the header, big endian         4 bytes
    seal of that length and the rest        32 bytes, or 100
    header, JSON with keys in order
    the leaves of a tree, one after the other, little endian

Nothing in a packet is executed or unpickled. The receiver knows the tree it expects;
shapes and types in the header are compared with it, never trusted. A packet that does
not fit is refused with a reason. The seal is a signature where both sides have keys
(`federation.signatures`); else a SHA-256, which is against damage, not forgers.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel.federation.refusals import RefusedError, is_plain, read_json

PROTOCOL = 6
EVERYONE = 2**32 - 1  # as the client of a packet: it is for every receiver
NOTICE = "notice"  # the kind of a packet that needs no answer
_MAGIC = b"FBL" + bytes([PROTOCOL])
START_BYTES = len(_MAGIC) + 4  # before the seal
_LONGEST_HEADER = 1 << 20
_COUNTS = 2**53 - 1  # the most that a field of a header counts to
_LONGEST_TEXT = 128  # characters of a field of a header
_LONGEST_MASK = 2**14  # characters of a mask, one for every four clients
_MOST = {"client": EVERYONE, "index": 2**31 - 1}  # programs count in 32 bits
_AXES = 32  # of a leaf of a start
_LARGEST_LEAF = 2**40  # numbers in it
SPARE = 1 << 20  # bytes a packet may have beyond its leaves
_KINDS = ("<f2", "<f4", "<f8")  # of a start
_BFLOAT16 = np.dtype(jnp.bfloat16)  # for which NumPy has no code
Spec = tuple[tuple[str, tuple[int, ...]], ...]
Bytes = bytes | bytearray | memoryview
# One after the other: put together they would be held a second time.
Parts = Iterable[Bytes]


# A packet as it was carried, or why it could not be: then that is its refusal.
Carried = bytes | bytearray | RefusedError


def sha256_of(parts: Parts) -> bytes:
    """Return the digest of some bytes, given in parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest()


class Seal:
    """Makes marks, of `size` bytes, by which receivers know what was sent.

    This one anybody can make: it shows damage, and nothing about the sender.
    """

    size = hashlib.sha256().digest_size

    def mark(self, content: Parts) -> bytes:
        """Return the mark of what is sent, given in parts."""
        return sha256_of(content)

    def author(self, content: Parts, mark: bytes) -> int | None:
        """Return the author of a mark, None if it has none; refuse a wrong one."""
        if self.mark(content) != mark:
            raise RefusedError(
                "damaged",
                "checksum differs: the packet is cut off or changed, or its sender "
                "signs packets and this side was given no keys",
            )


CHECKSUM = Seal()


@dataclass(frozen=True)
class Header:
    """Where a packet belongs. Both sides compare all of it with what they expect.

    `kind` is hello, exchange, agree, reveal, measure or conclude, in a reply the same.
    `client` is the sender of a reply. The server's packets are for everyone, so that
    clients at the same point get the same bytes, stored once in transit. `federation`
    is a name drawn anew for every federation, `attempt` counts the starts of its
    server. `settings` and `algorithm` are fingerprints. `exchange` numbers all
    exchanges of the run, `index` those of one phase; `stage` is setup or rounds.
    `accepted` is the last exchange of this client that the server took in, 0 for none,
    and `kept` the last one that no restart of the server can undo. `number` counts the
    requests of one attempt, so that none is answered twice; a reply has that of its
    request. `addressees` are the clients that are asked, by `mask_of`; a hello has
    none. `info` has what belongs to one kind alone.
    """

    kind: str
    federation: str
    settings: str
    algorithm: str
    client: int
    attempt: int
    number: int = 0
    addressees: str = ""
    round: int = 0
    exchange: int = 0
    stage: int = 0
    phase: int = 0
    name: str = ""
    index: int = 0
    accepted: int = 0
    kept: int = 0
    info: Mapping[str, Any] | None = None


def mask_of(clients: Iterable[int]) -> str:
    """Return a set of clients as one number, base 16: bit k says whether k is in it."""
    return f"{sum(1 << client for client in set(clients)):x}"


def in_mask(client: int, mask: str) -> bool:
    """Say whether a client is in a set of `mask_of`; an invalid one is empty."""
    try:
        return bool(int(mask, 16) >> client & 1)
    except ValueError:
        return False


def digest(leaf: np.ndarray) -> str:
    """Return a name for the content of a leaf."""
    value = np.asarray(leaf, order="C")
    about = f"{_kind_of(value)} {value.shape}".encode()
    return sha256_of([about, _bytes_of(value)]).hex()[:32]


def size_of(tree: PyTree) -> int:
    """Return the bytes of the leaves of a tree, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def spec_of(tree: PyTree) -> Spec:
    """Return types and shapes of the leaves of a tree, which may be abstract."""
    return tuple((_kind_of(leaf), tuple(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _kind_of(leaf: Any) -> str:
    """Return the type of numbers as it travels: bfloat16 by its name."""
    kind = np.dtype(leaf.dtype)
    return kind.name if kind == _BFLOAT16 else kind.newbyteorder("<").str


def _bytes_of(leaf: np.ndarray) -> memoryview:
    """Return the bytes of a leaf in C order, which are not copied."""
    return leaf.reshape(-1).view(np.uint8).data


def _type_of(kind: str) -> np.dtype:
    return _BFLOAT16 if kind == _BFLOAT16.name else np.dtype(kind)


def pack(
    header: Header,
    leaves: Sequence[np.ndarray] = (),
    known: frozenset[str] = frozenset(),
    seal: Seal = CHECKSUM,
) -> bytes:
    """Return a packet; of leaves whose digest the receiver has, only that is sent."""
    listed, body = [], []
    for leaf in leaves:
        value = np.asarray(leaf, order="C")
        value = value.astype(_type_of(_kind_of(value)), copy=False)
        name = digest(value) if known else None
        if name not in known:
            name = None
            body.append(_bytes_of(value))
        listed.append([_kind_of(value), list(value.shape), name])
    head = {**asdict(header), "leaves": listed}
    text = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False)
    rest = [text.encode(), *body]
    length = len(rest[0]).to_bytes(4, "big")
    # Long content is copied once, from the leaves to the packet.
    return b"".join([_MAGIC, length, seal.mark([length, *rest]), *rest])


def unpack(
    packet: Carried, largest: int, seal: Seal = CHECKSUM
) -> tuple[Header, list, memoryview]:
    """Return header, the list of leaves and their bytes, or refuse the packet.

    The bytes of leaves are not copied: they are those of the packet.
    """
    if isinstance(packet, RefusedError):
        raise packet
    if len(packet) > largest:
        raise RefusedError(
            "oversized", f"{len(packet)} bytes, at most {largest} expected"
        )
    begins = START_BYTES + seal.size
    if len(packet) < begins or packet[:3] != _MAGIC[:3]:
        raise RefusedError("garbage", "does not start like a packet")
    if packet[3] != PROTOCOL:
        raise RefusedError(
            "version",
            f"speaks protocol {packet[3]}, this side {PROTOCOL}; install the same "
            "version of fedbilevel on both sides",
        )
    length = int.from_bytes(packet[4:8], "big")
    rest = memoryview(packet)[begins:]
    mark = bytes(packet[START_BYTES:begins])
    author = seal.author([packet[4:START_BYTES], rest], mark)
    if length > min(len(rest), _LONGEST_HEADER):
        raise RefusedError("garbage", f"announces a header of {length} bytes")
    header, listed = _read_header(bytes(rest[:length]))
    if author is not None and header.client != author:
        raise RefusedError(
            "signature", f"{author} signed what says it is of {header.client}"
        )
    return header, listed, rest[length:]


def _read_header(text: bytes) -> tuple[Header, list]:
    try:
        values = read_json(text)
        listed = values.pop("leaves")
        header = Header(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RefusedError("garbage", f"header cannot be read ({error})") from error
    for field in fields(Header):
        value = getattr(header, field.name)
        if field.name == "info":
            right = value is None or isinstance(value, dict)
        elif field.type is int:
            right = type(value) is int and 0 <= value <= _MOST.get(field.name, _COUNTS)
        else:
            mask = field.name == "addressees"
            right = is_plain(value, _LONGEST_MASK if mask else _LONGEST_TEXT)
        if not right:
            raise RefusedError(
                "garbage", f"header field '{field.name}' is {value!r:.80}"
            )
    if not isinstance(listed, list):
        raise RefusedError("garbage", "header does not list leaves")
    return header, listed


def unpack_tree(
    listed: list,
    body: Bytes,
    like: PyTree,
    held: Mapping[str, np.ndarray] | None = None,
    *,
    finite: bool = True,
) -> PyTree:
    """Return the leaves as a tree like `like`; `held` are leaves by their digest."""
    expected, leaves, position = spec_of(like), [], 0
    if len(listed) != len(expected):
        raise RefusedError("shape", f"{len(listed)} leaves, {len(expected)} expected")
    for entry, (kind, shape) in zip(listed, expected, strict=True):
        reference = _check_entry(entry, kind, shape)
        if reference is None:
            leaves.append(_leaf(body, position, kind, shape))
            position += leaves[-1].nbytes
        elif held is None or reference not in held:
            raise RefusedError("unknown", "refers to a leaf that is not held here")
        elif spec_of(held[reference]) != ((kind, shape),):
            raise RefusedError("shape", "refers to a leaf of another shape")
        else:
            leaves.append(held[reference])
    if position != len(body):
        raise RefusedError("oversized", f"{len(body) - position} bytes too many")
    if finite and not all(np.isfinite(leaf).all() for leaf in leaves):
        raise RefusedError("not-finite", "holds NaN or infinity")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def unpack_start(listed: list, body: Bytes) -> list[np.ndarray]:
    """Return the leaves of a start, whose shapes only the site knows."""
    like = [jax.ShapeDtypeStruct(*_described(entry)) for entry in listed]
    return unpack_tree(listed, body, like)


def _leaf(body: Bytes, position: int, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the leaf at a place of the body, which is not copied."""
    count, numbers = math.prod(shape), _type_of(kind)
    if position + count * numbers.itemsize > len(body):
        raise RefusedError("truncated", f"{len(body)} bytes of leaves are too few")
    if not count:
        return np.zeros(shape, numbers)
    return np.frombuffer(body, numbers, count, position).reshape(shape)


def _described(entry: Any) -> tuple[tuple[int, ...], np.dtype]:
    known = isinstance(entry, list) and len(entry) == 3 and entry[0] in _KINDS
    if not known or not isinstance(entry[1], list) or entry[2] is not None:
        raise RefusedError("garbage", f"leaf listed as {entry!r:.80}")
    sizes = entry[1]
    right = len(sizes) <= _AXES and all(type(n) is int and n >= 0 for n in sizes)
    # Without its empty axes, too, a leaf must be of a size that can be.
    if not right or math.prod(max(n, 1) for n in sizes) > _LARGEST_LEAF:
        raise RefusedError("shape", f"{sizes!r:.80}")
    return tuple(sizes), np.dtype(entry[0])


def _check_entry(entry: Any, kind: str, shape: tuple[int, ...]) -> str | None:
    if not isinstance(entry, list) or len(entry) != 3:
        raise RefusedError("garbage", f"leaf listed as {entry!r:.80}")
    if entry[0] != kind:
        raise RefusedError("dtype", f"{entry[0]!r:.40} where {kind} is expected")
    if entry[1] != list(shape):
        raise RefusedError("shape", f"{entry[1]!r:.80} where {list(shape)} is expected")
    if not isinstance(entry[2], str | None):
        raise RefusedError("garbage", f"leaf refers to {entry[2]!r:.80}")
    return entry[2]
