"""A node that stays: one warm process, its state on disk, and nothing it is sent runs.

It speaks Flower's Fleet API to an unmodified SuperLink, like `flower-supernode`, but
answers packets in this process. The app that the SuperLink would send is not fetched.
"""

import functools
import logging
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

import httpx
from flwr.app import Message
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection

from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.federation.flower import messages
from fedbilevel.federation.signatures import read_private_key
from fedbilevel.federation.wire import Carried

_SHORTEST, _LONGEST = 0.1, 1.0  # seconds between two looks for messages
_BUSY = 5.0  # seconds after a message in which the next one is likely
_UNKNOWN_KEY = "[code: 2004]"  # Flower's words for a key that is not registered
_RETRY = 3.0  # seconds between two attempts to connect
Handle = Callable[[Carried], bytes]


@dataclass(frozen=True)
class Connection:
    """The address of the SuperLink, HOST:PORT, and the credentials of a node.

    Without a certificate of the authority the connection is not encrypted. `patience`
    are the seconds to try before giving up, at the start and after a loss.
    """

    superlink: str
    root_certificates: Path | None = None
    private_key: Path | None = None
    patience: float = 300.0

    def authority(self) -> bytes | None:
        """Return the certificate of the authority, or None to do without encryption."""
        if self.root_certificates is None:
            return None
        try:
            text = self.root_certificates.read_bytes()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=text.decode("ascii"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{self.root_certificates} cannot be read as a certificate ({error}). "
                "It must be the server's ca.crt, in PEM."
            ) from error
        return text

    def keys(self) -> tuple[Any, Any] | None:
        """Return the key pair, or None to be a node of no name."""
        if self.private_key is None:
            return None
        key = read_private_key(self.private_key)
        return key, key.public_key()


def serve_packets(
    connection: Connection,
    handle: Handle,
    *,
    largest: int,
    asked_to_stop: Callable[[], bool],
    report: Callable[[str], None],
) -> None:
    """Answer packets until asked to stop; connect again whenever that was lost.

    In the place of a packet with more than `largest` bytes, or of pieces that make
    none, `handle` is given the refusal.

    A node that was killed is not let in again until the SuperLink has noticed, about a
    minute later, so attempts to connect are repeated.
    """
    _keep_this_process()
    root, keys = connection.authority(), connection.keys()
    superlink, patience = connection.superlink, connection.patience
    since = time.monotonic()
    while not asked_to_stop():
        connected, lost = False, f"the connection to {superlink} was lost."
        try:
            with fleet_http_connection.http_request_response(
                superlink, root is None, root, keys, max_wait_time=_RETRY
            ) as calls:
                connected = True
                report(f"node {calls[0]} at {superlink}")
                _Mailbox(calls, largest).serve(handle, asked_to_stop)
        except _NotLetInError as error:
            lost = f"{superlink}: {error}"
        if asked_to_stop():
            return
        report(f"{lost} Trying again, for {patience:g} seconds at most.")
        since = time.monotonic() if connected else since
        if time.monotonic() - since > patience:
            raise FedbilevelError(
                f"the SuperLink at {superlink} did not let this node in for "
                f"{patience:g} seconds. The reason stands above. Check address, "
                "certificate and key, and that the key is registered there."
            )
        time.sleep(_RETRY)


class _NotLetInError(Exception):
    """What Flower says where it could not connect."""


def _keep_this_process() -> None:
    """Let Flower raise an error where it would end this process.

    If it cannot connect it exits, by force five seconds later, even if that is caught.
    If it is not authorized, by a wrong clock or a key no longer registered, it sends
    this process a Ctrl-C, which would look like the operator's. Its log entries of
    every attempt are reported once, by the handler of that error.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    setattr(fleet_http_connection, "flwr_exit", _not_let_in)  # noqa: B010
    setattr(fleet_http_connection, "make_simple_http_retry_invoker", _retry)  # noqa: B010


def _not_let_in(code: int, message: str) -> NoReturn:
    """Say whether no server answers, or one that does not know this node yet."""
    reason, error = message.partition("\n")[2] or message, sys.exc_info()[1]
    reason = f"({reason.strip()}, Flower's code {code})"
    if _UNKNOWN_KEY in reason:
        # So every start begins where the node is there before the server.
        raise _NotLetInError(
            "waiting for the server to admit this key. It does so when it starts, and "
            "a minute after a node was killed. If it does not, compare the key with "
            f"the one that the server was given {reason}."
        )
    if isinstance(error, httpx.HTTPStatusError):
        raise _NotLetInError(
            "the server refuses this node: it was started without a key, or its clock "
            f"is wrong {reason}."
        )
    if isinstance(error, httpx.ConnectError) and "CERTIFICATE" not in reason:
        raise _NotLetInError(
            f"no server answers. It is not running, or has another address {reason}."
        )
    raise _NotLetInError(f"no connection {reason}.")


def _retry() -> RetryInvoker:
    invoker = make_simple_http_retry_invoker()
    hopeless = invoker.should_giveup

    def give_up(error: Exception) -> bool:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == HTTPStatus.UNAUTHORIZED:
            return True
        return hopeless is not None and hopeless(error)

    invoker.should_giveup = give_up
    return invoker


class _Mailbox:
    """Messages of one connection."""

    def __init__(self, calls: tuple, largest: int) -> None:
        self.largest = largest
        _, self.receive, self.send, _, _, self.pull, self.push, self.confirm = calls

    def serve(self, handle: Handle, asked_to_stop: Callable[[], bool]) -> None:
        """Answer messages; look often while the federation is busy."""
        pause, last = _SHORTEST, time.monotonic()
        while not asked_to_stop():
            try:
                received = self._next()
                if received is not None:
                    self._answer(*received, handle)
                    pause, last = _SHORTEST, time.monotonic()
                    continue
            except RunNotRunningException:
                pass  # the server that asked is gone
            if time.monotonic() - last > _BUSY:
                pause = min(1.5 * pause, _LONGEST)
            time.sleep(pause)

    def _next(self) -> tuple[Message, Carried] | None:
        """Return a message without its content, and the packet in it or its refusal."""
        received = self.receive()
        if received is None:
            return None
        message, tree = received
        run, names = message.metadata.run_id, messages.piece_objects(tree)

        def piece(name: str) -> Mapping[str, Any]:
            # The message is seen before all of it has been sent.
            pull = functools.partial(self.pull, run)
            found = inflatable_utils.pull_objects(
                [name], pull, initial_backoff=0.02, backoff_cap=0.5
            )
            return messages.record_in(found[name])

        packet = messages.Assembly(names, self.largest).filled(piece)
        self.confirm(run, tree.object_id)
        return message, packet

    def _answer(self, message: Message, packet: Carried, handle: Handle) -> None:
        began = time.monotonic()
        reply = Message(content=messages.as_content(handle(packet)), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run = message.metadata.run_id
        with inflatable_object.no_object_id_recompute():
            tree = inflatable_object.get_object_tree(reply)
            objects = inflatable_object.get_all_nested_objects(reply)
            wanted, session = self.send(reply, tree, time.monotonic() - began)
            # The server asks for pieces alone: what wraps them need not be sent.
            messages.push_objects(
                objects,
                wanted.intersection(messages.piece_objects(tree)),
                lambda name, content: self.push(run, session, name, content),
            )
