"""Elliptic curve keys that sign: who holds the public one knows who wrote some bytes.

The keys are those that Flower knows a node by, made with `ssh-keygen -t ecdsa -b 384`.
A signature is ECDSA over SHA-384 of the purpose, a zero byte and the message, so that
what was signed for one purpose cannot be shown for another. Needs `cryptography`, which
comes with `fedbilevel[flower]`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedbilevel._files import write_atomically
from fedbilevel.errors import InvalidInputError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
T = TypeVar("T", PrivateKey, PublicKey)
_LARGEST = 384  # bits of a key
_NUMBER_BYTES = _LARGEST // 8  # of each of the two numbers of a signature
SIGNATURE_BYTES = 2 * _NUMBER_BYTES
_HASH = ec.ECDSA(hashes.SHA384())


def read_private_key(path: Path) -> PrivateKey:
    """Return the private key in a file of ssh-keygen, without a passphrase."""
    advice = "Make one with `ssh-keygen -t ecdsa -b 384`, without a passphrase."
    return _read_key(
        path, lambda data: load_ssh_private_key(data, None), PrivateKey, advice
    )


def read_public_key(path: Path) -> PublicKey:
    """Return the public key in a file that ssh-keygen wrote beside the private one."""
    advice = "Give the file that `ssh-keygen` wrote beside the private one, NAME.pub."
    return _read_key(path, load_ssh_public_key, PublicKey, advice)


def _read_key(
    path: Path, load: Callable[[bytes], Any], kind: type[T], advice: str
) -> T:
    named = "private" if kind is PrivateKey else "public"
    try:
        key = load(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
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
    text = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), 0o600)  # before there is anything to read in it
        file.write(text)

    public = public_bytes(key.public_key()) + b"\n"
    write_atomically(path, write)
    write_atomically(path.with_name(f"{path.name}.pub"), lambda f: f.write(public))


def public_bytes(key: PublicKey) -> bytes:
    """Return a public key as ssh-keygen writes it, without a comment."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def sign(key: PrivateKey, purpose: bytes, message: bytes) -> bytes:
    """Return a signature of `SIGNATURE_BYTES` bytes."""
    r, s = decode_dss_signature(key.sign(purpose + b"\0" + message, _HASH))
    return r.to_bytes(_NUMBER_BYTES, "big") + s.to_bytes(_NUMBER_BYTES, "big")


def is_signed(key: PublicKey, purpose: bytes, message: bytes, signature: bytes) -> bool:
    """Say whether the owner of a key signed a message for a purpose."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    r = int.from_bytes(signature[:_NUMBER_BYTES], "big")
    s = int.from_bytes(signature[_NUMBER_BYTES:], "big")
    try:
        key.verify(encode_dss_signature(r, s), purpose + b"\0" + message, _HASH)
    except InvalidSignature:
        return False
    return True
