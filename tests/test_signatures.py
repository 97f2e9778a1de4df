"""Signatures tell who wrote some bytes, and what for."""

import pytest

from fedbilevel.errors import InvalidInputError
from fedbilevel.federation import signatures
from fedbilevel.federation.signatures import is_signed, sign


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "site"
    signatures.make_key_pair(path)
    private = signatures.read_private_key(path)
    return private, signatures.read_public_key(path.with_suffix(".pub"))


def test_a_signature_holds_for_its_message_purpose_and_key_alone(pair):
    private, public = pair
    stranger = signatures.ec.generate_private_key(signatures.ec.SECP384R1())
    made = sign(private, b"reply", b"text")
    assert len(made) == signatures.SIGNATURE_BYTES
    assert is_signed(public, b"reply", b"text", made)
    assert not is_signed(public, b"reply", b"texu", made)
    assert not is_signed(public, b"request", b"text", made)
    assert not is_signed(public, b"reply", b"text", sign(stranger, b"reply", b"text"))
    assert not is_signed(stranger.public_key(), b"reply", b"text", made)


def test_no_changed_signature_holds(pair):
    private, public = pair
    made = sign(private, b"reply", b"text")
    changed = [bytes(96), b"\xff" * 96, b"", made[:-1], made + b"\0"]
    changed += [
        made[:i] + bytes([made[i] ^ 1]) + made[i + 1 :] for i in range(0, 96, 7)
    ]
    assert not any(is_signed(public, b"reply", b"text", one) for one in changed)


def test_what_is_no_key_is_refused_by_name(tmp_path):
    path = tmp_path / "site"
    path.write_text("no key")
    for read in (signatures.read_private_key, signatures.read_public_key):
        for given in (path, tmp_path / "missing", tmp_path):
            with pytest.raises(InvalidInputError, match="ssh-keygen"):
                read(given)
