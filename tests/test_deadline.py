"""A reply of which only a part arrived holds nobody up beyond the deadline."""

import time
from typing import Any, cast

import pytest
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
)
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid

from fedbilevel.runtime.flower.grid import GridTransport


class HalfAReply:
    """Announces a reply whose objects never come: its node died while sending."""

    def push_messages(self, messages: list) -> list[str]:
        return ["asked"] * len(messages)

    def pull_messages(self, ids: list[str]) -> list:
        def pull(name: str) -> bytes:
            raise ObjectUnavailableError(name)

        try:
            vars(http_grid)["pull_objects"](object_ids=ids, pull_object_fn=pull)
        except ObjectPullError:
            pass
        return []


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Pretend to be a ServerApp; what the transport changes in Flower is restored."""
    monkeypatch.setattr(http_grid, "pull_objects", vars(http_grid)["pull_objects"])
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def test_it_counts_as_none_at_the_deadline():
    transport = GridTransport(cast(Any, HalfAReply()), lambda: None)
    began = time.monotonic()
    assert transport.exchange({7: b"packet"}, 0.5, lambda *_: False) == {}
    assert 0.4 < time.monotonic() - began < 5


def test_a_server_that_waits_for_it_can_be_stopped():
    end = time.monotonic() + 0.5

    def halt() -> None:
        if time.monotonic() > end:
            raise KeyboardInterrupt

    transport = GridTransport(cast(Any, HalfAReply()), halt)
    with pytest.raises(KeyboardInterrupt):
        transport.exchange({7: b"packet"}, 60, lambda *_: False)
    assert time.monotonic() < end + 5
