"""Elliptic curve signatures: the public key shows the author of some bytes.

TLS and Flower's keys authenticate connections, not the author of a packet: Flower
carries what one node pushes to another as if the server had sent it. So the server
signs its requests, every site its replies, and the site named in a header must have
signed it.

The keys are those that Flower knows a node by, made with `ssh-keygen -t ecdsa -b 384`.
A signature is ECDSA over SHA-384 of the purpose, a zero byte and the message, so that
what was signed for one purpose cannot be shown for another. Needs `cryptography`, which
comes with `fedbilevel[flower]`.
"""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from fedbilevel._files import DAMAGED, write_atomically
from fedbilevel.errors import InvalidInputError
from fedbilevel.federation import wire
from fedbilevel.federation.refusals import RefusedError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
T = TypeVar("T", PrivateKey, PublicKey)
_LARGEST = 384  # bits of a key
_NUMBER_BYTES = _LARGEST // 8  # of each of the two numbers of a signature
SIGNATURE_BYTES = 2 * _NUMBER_BYTES
_HASH = ec.ECDSA(hashes.SHA384())
_REQUEST = f"fedbilevel request, protocol {wire.PROTOCOL}".encode()
_REPLY = f"fedbilevel reply, protocol {wire.PROTOCOL}".encode()
_MASKING = b"fedbilevel masking key"
_AUTHOR_BYTES = 4  # of the signer


def read_private_key(path: Path) -> PrivateKey:
    """Return the private key in a file of ssh-keygen, without a passphrase."""
    advice = "Make one with `ssh-keygen -t ecdsa -b 384`, without a passphrase."
    load = functools.partial(serialization.load_ssh_private_key, password=None)
    return _read_key(path, load, PrivateKey, advice)


def read_public_key(path: Path) -> PublicKey:
    """Return the public key in a file that ssh-keygen wrote beside the private one."""
    advice = "Give the file that `ssh-keygen` wrote beside the private one, NAME.pub."
    return _read_key(path, serialization.load_ssh_public_key, PublicKey, advice)


def _read_key(
    path: Path, load: Callable[[bytes], Any], kind: type[T], advice: str
) -> T:
    named = "private" if kind is PrivateKey else "public"
    try:
        key = load(path.read_bytes())
    except (*DAMAGED, UnsupportedAlgorithm) as error:
        raise InvalidInputError(
            f"{path} cannot be read as a {named} key ({error}). {advice}"
        ) from error
    if not isinstance(key, kind) or key.key_size > _LARGEST:
        raise InvalidInputError(
            f"{path} is no elliptic curve key of at most {_LARGEST} bits. Make one "
            "with `ssh-keygen -t ecdsa -b 384`."
        )
    return key


def make_key_pair(path: Path) -> None:
    """Write a new key as ssh-keygen does, and the public one beside it, NAME.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    kind = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
    text = key.private_bytes(*kind, serialization.NoEncryption())
    write_atomically(path, text, mode=0o600)
    public = public_bytes(key.public_key()) + b"\n"
    write_atomically(path.with_name(f"{path.name}.pub"), public)


def public_bytes(key: PublicKey) -> bytes:
    """Return a public key as ssh-keygen writes it, without a comment."""
    kind = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return key.public_bytes(*kind)


def sign(key: PrivateKey, purpose: bytes, message: bytes) -> bytes:
    """Return a signature of `SIGNATURE_BYTES` bytes."""
    r, s = utils.decode_dss_signature(key.sign(purpose + b"\0" + message, _HASH))
    return r.to_bytes(_NUMBER_BYTES, "big") + s.to_bytes(_NUMBER_BYTES, "big")


def is_signed(key: PublicKey, purpose: bytes, message: bytes, signature: bytes) -> bool:
    """Say whether the owner of a key signed a message for a purpose."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    r = int.from_bytes(signature[:_NUMBER_BYTES], "big")
    s = int.from_bytes(signature[_NUMBER_BYTES:], "big")
    try:
        key.verify(utils.encode_dss_signature(r, s), purpose + b"\0" + message, _HASH)
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True)
class KeyFiles:
    """Where the keys of one side lie, as ssh-keygen writes them.

    `private` is its own, `peers` are public ones: at the server those of clients 0, 1,
    ..., at a site that of the server.
    """

    private: Path
    peers: tuple[Path, ...]


@dataclass(frozen=True)
class Signatures(wire.Seal):
    """The seal of one side: it signs with its own key, and knows those of its peers.

    `own` is the number under which it signs, that of a client or EVERYONE for the
    server; `peers` are the public keys by number. The SHA-256 of the content is signed,
    for the purpose `writes`; marks are read for the purpose `reads`.
    """

    own: int
    private: PrivateKey
    peers: Mapping[int, PublicKey]
    writes: bytes
    reads: bytes
    size = _AUTHOR_BYTES + SIGNATURE_BYTES

    def mark(self, content: wire.Parts) -> bytes:
        """Return the signer, and the signature."""
        signature = sign(self.private, self.writes, wire.sha256_of(content))
        return self.own.to_bytes(_AUTHOR_BYTES, "big") + signature

    def author(self, content: wire.Parts, mark: bytes) -> int:
        """Return the signer; refuse content without a known one."""
        number = int.from_bytes(mark[:_AUTHOR_BYTES], "big")
        key, signature = self.peers.get(number), mark[_AUTHOR_BYTES:]
        # Of long packets SHA-256 is several times faster than the SHA-384 of a
        # signature.
        found = wire.sha256_of(content)
        if key is None or not is_signed(key, self.reads, found, signature):
            raise RefusedError(
                "signature",
                "not signed with a key that is known here: somebody else's packet, a "
                "changed one, or one of a side that runs without keys",
            )
        return number


def server_seal(keys: KeyFiles | None) -> wire.Seal:
    """Return the server's seal, which is a checksum without keys."""
    if keys is None:
        return wire.CHECKSUM
    peers = {client: read_public_key(path) for client, path in enumerate(keys.peers)}
    first: dict[bytes, int] = {}
    for client, key in peers.items():
        other = first.setdefault(public_bytes(key), client)
        if other != client:
            raise InvalidInputError(
                f"clients {other} and {client} have the same key, "
                f"{keys.peers[client]}. Make one for every site."
            )
    private = read_private_key(keys.private)
    return Signatures(wire.EVERYONE, private, peers, writes=_REQUEST, reads=_REPLY)


def site_seal(client: int, keys: KeyFiles | None) -> wire.Seal:
    """Return the seal of one client, which is a checksum without keys."""
    if keys is None:
        return wire.CHECKSUM
    (server_key,) = keys.peers
    peers = {wire.EVERYONE: read_public_key(server_key)}
    private = read_private_key(keys.private)
    return Signatures(client, private, peers, writes=_REPLY, reads=_REQUEST)


class SiteIdentity:
    """The private key of client number `client`, and the public keys of all clients.

    A masking key is made for one federation and sent through the server, which could
    send another one. So a site signs it with the key of its node, and takes those of
    others only if they are signed by the keys on its own list, which it got outside of
    the federation.
    """

    def __init__(
        self, client: int, private: PrivateKey, public: Sequence[PublicKey]
    ) -> None:
        self._private, self._public = private, tuple(public)
        numbers = [key.public_numbers() for key in self._public]
        twice = [k for k, one in enumerate(numbers) if numbers.index(one) != k]
        if twice:
            raise InvalidInputError(
                f"client {twice[0]} has the public key of client "
                f"{numbers.index(numbers[twice[0]])}. Give each site's own key, in the "
                "order of clients."
            )
        if numbers[client : client + 1] != [private.public_key().public_numbers()]:
            raise InvalidInputError(
                f"the public key listed for client {client} is not that of this site's "
                "private key. Give the keys of all clients, from client 0 on."
            )
        self._known: dict[int, tuple[str, bytes]] = {}  # what was checked last

    @staticmethod
    def read(client: int, private: Path, public: Sequence[Path]) -> "SiteIdentity":
        """Return the identity whose keys lie in files of ssh-keygen."""
        known = [read_public_key(path) for path in public]
        return SiteIdentity(client, read_private_key(private), known)

    def sign(self, federation: str, client: int, key: bytes) -> bytes:
        """Return the signature that goes with this site's masking key."""
        return sign(self._private, _MASKING, _statement(federation, client, key))

    def check(
        self,
        federation: str,
        keys: Mapping[int, bytes],
        signatures: Mapping[int, bytes],
    ) -> None:
        """Refuse masking keys, by client, that the clients did not sign themselves."""
        for client, key in sorted(keys.items()):
            if self._known.get(client) == (federation, key):
                continue
            if not 0 <= client < len(self._public):
                raise RefusedError("key", f"client {client} is not on this site's list")
            statement = _statement(federation, client, key)
            signature = signatures.get(client, b"")
            if not is_signed(self._public[client], _MASKING, statement, signature):
                raise RefusedError(
                    "key",
                    f"the masking key of client {client} is not signed by the key that "
                    "this site's list has for it",
                )
            self._known[client] = (federation, key)


def _statement(federation: str, client: int, key: bytes) -> bytes:
    name = federation.encode()
    return struct.pack("<QQ", len(name), client) + name + key
