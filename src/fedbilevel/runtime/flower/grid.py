"""The server's transport: Flower's grid, with our own polling and deadline."""

import time
from collections.abc import Callable, Mapping

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid

from fedbilevel.runtime.flower.messages import KIND, as_content, packet_of

__all__ = ["GridTransport"]

_SHORTEST, _LONGEST = 0.05, 0.25  # seconds between two looks for replies


class GridTransport:
    """Pushes packets and pulls replies; `halt` is called often and may raise."""

    def __init__(self, grid: Grid, halt: Callable[[], None]) -> None:
        self.grid, self.halt = grid, halt
        self._end = 0.0  # when the exchange must be over
        setattr(http_grid, "pull_objects", self._pull)  # noqa: B010 - not exported

    def _pull(
        self, object_ids: list[str], pull_object_fn: Callable[[str], bytes]
    ) -> dict[str, bytes]:
        """Pull the objects of a reply, which may be seen before all of them are there.

        Flower would look again after a second, which is longer than a round, and long
        after the deadline if the node died before it had sent them.
        """

        def pull(name: str) -> bytes:
            self.halt()
            return pull_object_fn(name)

        return pull_objects(
            object_ids,
            pull,
            max_time=self._end - time.monotonic(),
            max_tries_per_object=None,
            initial_backoff=0.02,
            backoff_cap=0.5,
        )

    def nodes(self) -> set[int]:
        """Return the nodes that the SuperLink thinks are alive."""
        return set(self.grid.get_node_ids())

    def exchange(
        self,
        packets: Mapping[int, bytes],
        seconds: float,
        enough: Callable[[set[int], float], bool],
    ) -> dict[int, bytes]:
        """Send to nodes; return what came back in time.

        An error that Flower reports for a node counts as no answer. Its replies are
        told by the message they answer: the sender of an error is not the node.
        """
        messages = [
            Message(
                content=as_content(packet),
                message_type=KIND,
                dst_node_id=node,
                ttl=seconds,
                group_id="0",
            )
            for node, packet in packets.items()
        ]
        began, pause, came = time.monotonic(), _SHORTEST, {}
        self._end = began + seconds
        ids = list(self.grid.push_messages(messages))
        waiting = {i: node for i, node in zip(ids, packets, strict=False) if i}
        while waiting:
            self.halt()
            replies = list(self.grid.pull_messages(list(waiting)))
            for reply in replies:
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_content():
                    came[node] = packet_of(reply)
            elapsed = time.monotonic() - began
            if not waiting or elapsed > seconds or enough(set(came), elapsed):
                break
            pause = _SHORTEST if replies else min(1.5 * pause, _LONGEST)
            time.sleep(pause)
        return came
