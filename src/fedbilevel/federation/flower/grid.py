"""The server's transport: Flower's grid, with our own pulling and deadline."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import cast

import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable import (
    inflatable_object,
    inflatable_protobuf_utils,
    inflatable_utils,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedbilevel.federation.flower.messages import (
    KIND,
    Assembly,
    as_content,
    fingerprint,
    piece_objects,
    push_objects,
    record_in,
)
from fedbilevel.federation.wire import Carried

_SHORTEST, _LONGEST = 0.05, 0.25  # seconds between two looks for replies


class GridTransport:
    """Pushes packets and pulls replies; `halt` is called often and may raise."""

    def __init__(self, grid: Grid, halt: Callable[[], None]) -> None:
        self.grid, self.halt = cast(HttpGrid, grid), halt
        self._keys: dict[int, str] = {}

    def nodes(self) -> set[int]:
        """Return the nodes that the SuperLink thinks are alive."""
        self.halt()
        with _a_failure_passes():
            nodes = self.grid.get_nodes()
            self._keys = {one.node_id: fingerprint(one.public_key) for one in nodes}
        return set(self._keys)

    def key(self, node: int) -> str:
        """Return the fingerprint of a node's public key."""
        return self._keys[node]

    def exchange(
        self,
        packets: Mapping[int, bytes],
        seconds: float,
        enough: Callable[[set[int], float], bool],
        largest: int,
    ) -> dict[int, Carried]:
        """Send to nodes; return what came back in time."""
        began, pause, came = time.monotonic(), _SHORTEST, {}
        mail = _Mail(self.grid, largest)
        if packets:
            with _a_failure_passes():
                mail.send(packets, seconds)
        while mail.waiting:
            self.halt()
            newest = mail.look()
            came |= newest
            elapsed = time.monotonic() - began
            if elapsed > seconds or enough(set(came), elapsed):
                break
            if mail.waiting:
                pause = _SHORTEST if newest else min(1.5 * pause, _LONGEST)
                time.sleep(pause)
        return came


@contextmanager
def _a_failure_passes() -> Iterator[None]:
    """Continue after a failure of the SuperLink: it was killed, and will restart.

    It forgets interrupted senders, and fails on a message that it has already.
    """
    try:
        yield
    except inflatable_utils.ObjectPushError:
        pass
    except httpx.HTTPStatusError as error:
        if error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise


class _Mail:
    """Messages and the replies to them; `waiting` has the nodes that owe one.

    Flower itself pulls replies by three requests where one object is of
    interest, and waits for a node that died while it sent its reply.
    """

    def __init__(self, grid: HttpGrid, largest: int) -> None:
        self.waiting: dict[str, int] = {}  # node by the number of the message
        self._client = grid._runtime_client
        self._node, self._run = grid.node, grid.run.run_id
        # The number of a reply and what came of it, by that of the message.
        self._seen: dict[str, tuple[str, Assembly]] = {}
        self._largest = largest  # bytes of a reply
        self._pull = inflatable_protobuf_utils.make_pull_object_fn_protobuf(
            self._client.PullObject, self._node, self._run
        )

    def send(self, packets: Mapping[int, bytes], seconds: float) -> None:
        """Send packets to nodes, to be answered within some seconds."""
        # Nodes that are sent the same have it from the same object in Flower's store.
        contents = {packet: as_content(packet) for packet in set(packets.values())}
        headers, trees, objects = [], [], {}
        with inflatable_object.no_object_id_recompute():
            for node, packet in packets.items():
                content = contents[packet]
                message = Message(content, node, KIND, ttl=seconds, group_id="0")
                message.metadata.__dict__["_message_id"] = message.object_id
                headers.append(message_to_proto(remove_content_from_message(message)))
                trees.append(inflatable_object.get_object_tree(message))
                objects |= inflatable_object.get_all_nested_objects(message)
            pushed = {"messages_list": headers, "message_object_trees": trees}
            taken = self._client.PushMessages(PushAppMessagesRequest(**pushed))
            push = inflatable_protobuf_utils.make_push_object_fn_protobuf(
                self._client.PushObject, self._node, self._run, taken.session_id
            )
            push_objects(objects, taken.objects_to_push, push)
        numbers = zip(taken.message_ids, packets, strict=True)
        self.waiting = {number: node for number, node in numbers if number}

    def look(self) -> dict[int, Carried]:
        """Return the packets that came since the last look, by node."""
        with _a_failure_passes():
            self._announced([i for i in self.waiting if i not in self._seen])
        came = {}
        for asked, (number, assembly) in list(self._seen.items()):
            with _a_failure_passes():
                try:
                    packet = assembly.filled(lambda name: record_in(self._pull(name)))
                except inflatable_utils.ObjectUnavailableError:
                    continue  # it has not arrived yet
                except inflatable_utils.ObjectPullError:
                    self._forget(asked)
                    continue
                came[self._forget(asked)] = packet
                known = {"node": self._node, "run_id": self._run}
                confirmed = ConfirmMessageReceivedRequest(
                    **known, message_object_id=number
                )
                self._client.ConfirmMessageReceived(confirmed)
        return came

    def _announced(self, numbers: Collection[str]) -> None:
        """Note which replies there are; an error of Flower's counts as no answer.

        A reply is known by the message it answers: the sender of an error is not the
        node.
        """
        if not numbers:
            return
        answer = self._client.PullMessages(PullAppMessagesRequest(message_ids=numbers))
        trees = answer.message_object_trees
        for reply, tree in zip(answer.messages_list, trees, strict=True):
            asked = reply.metadata.reply_to_message_id
            if reply.HasField("error"):
                self._forget(asked)
            else:
                assembly = Assembly(piece_objects(tree), self._largest)
                self._seen[asked] = (reply.metadata.message_id, assembly)

    def _forget(self, asked: str) -> int:
        self._seen.pop(asked, None)
        return self.waiting.pop(asked)
