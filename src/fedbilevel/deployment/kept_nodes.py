"""A SuperLink's nodes on disk. All else of Flower's stays in memory.

Flower's own database holds every message, object and session, too, and each look of a
node for messages is a dozen SQL statements: twice the time of a round. A killed
SuperLink may lose all of it but its nodes, by number and key, and revoked keys. A run
is over when its SuperLink ends: the server begins another one, after the last round
that it kept itself.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.common.constant import Status, SubStatus
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate import InMemoryLinkState, linkstate_factory
from flwr.supercore.constant import NodeStatus
from flwr.supercore.date import now
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import RunStatus
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from fedbilevel._files import DAMAGED, write_atomically
from fedbilevel.errors import InvalidInputError

_FORMAT = 1
_LARGEST = 64 << 20  # bytes of a file that is read


def _keeping(change: Callable) -> Any:
    """Let a method that changes the nodes write them to the file, too."""

    @functools.wraps(change)
    def changed(self: "KeptNodes", *arguments: Any, **more: Any) -> Any:
        with self.lock:
            result = change(self, *arguments, **more)
            nodes = [MessageToDict(node) for node in self.nodes.values()]
            text = json.dumps({"format": _FORMAT, "nodes": nodes}, indent=1)
            write_atomically(self._file, text, mode=0o600)
            return result

    return changed


class KeptNodes(InMemoryLinkState):
    """Flower's state in memory, with the nodes in a file, replaced at every change."""

    def __init__(self, database_path: str, *more: Any) -> None:
        super().__init__(*more)
        self._file = Path(database_path)

    def initialize(self) -> None:
        """Read the nodes of an earlier SuperLink, if there was one.

        Known nodes have one interval to send the next heartbeat. So nodes that did not
        notice continue, and restarted ones are soon let in again.
        """
        if not self._file.exists():
            return
        soon = now().timestamp()
        for node in _read(self._file):
            if node.status == NodeStatus.ONLINE:
                node.online_until = soon + node.heartbeat_interval
            self.nodes[node.node_id] = node
            self.node_public_key_to_node_id[node.public_key] = node.node_id
            self.owner_to_node_ids.setdefault(node.owner_aid, set()).add(node.node_id)

    create_node = _keeping(InMemoryLinkState.create_node)
    delete_node = _keeping(InMemoryLinkState.delete_node)
    activate_node = _keeping(InMemoryLinkState.activate_node)
    deactivate_node = _keeping(InMemoryLinkState.deactivate_node)

    def get_run_status(self, run_ids: set[int]) -> dict[int, RunStatus]:
        """Return the statuses of runs; those of an earlier SuperLink have ended.

        Nodes that still answer them learn it, as of any run that was stopped.
        """
        ended = RunStatus(Status.FINISHED, SubStatus.STOPPED, "the SuperLink ended")
        known = super().get_run_status(run_ids)
        return {run: known.get(run, ended) for run in run_ids}


class _Objects(InMemoryObjectStore):
    """Objects in memory, where Flower would make a database of them."""

    def __init__(self, database_path: str) -> None:
        super().__init__()  # and no file

    def initialize(self) -> None:
        """Begin without any."""


def keep_only_nodes() -> None:
    """Let Flower make these where it is given a database."""
    setattr(linkstate_factory, "SqlLinkState", KeptNodes)  # noqa: B010
    setattr(object_store_factory, "SqlObjectStore", _Objects)  # noqa: B010


def _read(file: Path) -> list[NodeInfo]:
    try:
        if file.stat().st_size > _LARGEST:
            raise ValueError(f"more than {_LARGEST >> 20} MiB")
        held = json.loads(file.read_text())
        if held["format"] != _FORMAT:
            raise ValueError(f"format {held['format']}")
        return [ParseDict(node, NodeInfo()) for node in held["nodes"]]
    except (*DAMAGED, ParseError, SystemError) as error:  # of Flower's own library
        raise InvalidInputError(
            f"{file} cannot be read as the nodes of a SuperLink ({error}). It says "
            "whose key was revoked: put it back from a copy, or serve in a new folder."
        ) from error
