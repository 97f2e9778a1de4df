"""Parts of a message that are missing hold nobody up beyond the deadline."""

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.proto.message_pb2 import (
    Message,
    ObjectTree,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedbilevel.federation.flower.grid import GridTransport


def announced(request: Any) -> PullAppMessagesResponse:
    """A reply is there, but its packet is not: its node died while it sent it."""
    reply = Message()
    reply.metadata.message_id = "reply"
    reply.metadata.reply_to_message_id = "asked"
    records = ObjectTree(object_id="records", children=[ObjectTree(object_id="piece")])
    tree = ObjectTree(object_id="reply", children=[records])
    return PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree])


def everything(request: Any) -> PushAppMessagesResponse:
    """The SuperLink has nothing yet of a message."""
    (tree,) = request.message_object_trees
    wanted = [node.object_id for node in iterate_object_tree(tree)]
    return PushAppMessagesResponse(message_ids=["asked"], objects_to_push=wanted)


@pytest.fixture
def grid(monkeypatch) -> Any:
    """What a ServerApp has of Flower."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    client = SimpleNamespace(
        PushMessages=everything,
        PushObject=lambda request: PushObjectResponse(stored=True),
        PullMessages=announced,
        PullObject=lambda request: PullObjectResponse(
            object_found=True, object_available=False
        ),
    )
    run = SimpleNamespace(run_id=1)
    return SimpleNamespace(_runtime_client=client, node=None, run=run)


def test_it_counts_as_none_at_the_deadline(grid):
    transport = GridTransport(grid, lambda: None)
    began = time.monotonic()
    assert transport.exchange({7: b"packet"}, 0.5, lambda *_: False, 99) == {}
    assert 0.4 < time.monotonic() - began < 5


def test_a_server_that_waits_for_it_can_be_stopped(grid):
    end = time.monotonic() + 0.5

    def halt() -> None:
        if time.monotonic() > end:
            raise KeyboardInterrupt

    transport = GridTransport(grid, halt)
    with pytest.raises(KeyboardInterrupt):
        transport.exchange({7: b"packet"}, 60, lambda *_: False, 99)
    assert time.monotonic() < end + 5


def test_nobody_was_asked_if_the_superlink_forgot_the_message_meanwhile(grid):
    grid._runtime_client.PushObject = lambda request: PushObjectResponse(stored=False)
    transport = GridTransport(grid, lambda: None)
    began = time.monotonic()
    assert transport.exchange({7: b"packet"}, 60, lambda *_: False, 99) == {}
    assert time.monotonic() - began < 5


def failing(status: int) -> Any:
    def call(request: Any) -> None:
        question = httpx.Request("POST", "http://superlink")
        answer = httpx.Response(status, request=question)
        answer.raise_for_status()

    return call


@pytest.mark.parametrize("call", ["PushMessages", "PullMessages", "PullObject"])
def test_a_superlink_that_fails_is_asked_again_later(grid, call):
    setattr(grid._runtime_client, call, failing(500))
    transport = GridTransport(grid, lambda: None)
    assert transport.exchange({7: b"packet"}, 0.3, lambda *_: False, 99) == {}


def test_one_that_refuses_is_not(grid):
    grid._runtime_client.PushMessages = failing(403)
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        GridTransport(grid, lambda: None).exchange({7: b""}, 9, lambda *_: False, 99)


def test_the_packet_is_sent_last(grid):
    """Then nobody can confirm a message, and delete it, while it is being sent."""
    sent = []

    def push(request: Any) -> PushObjectResponse:
        sent.append(b"the packet" in request.object_content)
        return PushObjectResponse(stored=True)

    grid._runtime_client.PushObject = push
    transport = GridTransport(grid, lambda: None)
    transport.exchange({7: b"the packet"}, 0.1, lambda *_: False, 99)
    assert sent == [False, False, True]
