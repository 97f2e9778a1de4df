"""What a SuperLink that was killed still knows: its nodes, and who was revoked."""

import json

import pytest
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.constant import NodeStatus
from flwr.supercore.object_store import ObjectStoreFactory, object_store_factory
from flwr.superlink.federation import NoOpFederationManager

from fedbilevel.deployment.kept_nodes import KeptNodes, keep_only_nodes
from fedbilevel.deployment.superlink import KEPT, SuperLink
from fedbilevel.errors import InvalidInputError

INTERVAL = 30.0


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts states of SuperLinks, each as Flower does with --database."""
    # What is replaced is put back for other tests.
    for module, name in (
        (linkstate_factory, "SqlLinkState"),
        (object_store_factory, "SqlObjectStore"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    keep_only_nodes()
    file = str(tmp_path / KEPT)

    def start() -> KeptNodes:
        objects = ObjectStoreFactory(file)
        state = LinkStateFactory(file, NoOpFederationManager(), objects).state()
        assert isinstance(state, KeptNodes)
        return state

    return start


def create(state: KeptNodes, key: bytes) -> int:
    return state.create_node("owner", "name", key, INTERVAL)


def test_nodes_have_the_same_numbers_after_a_kill(started):
    first = started()
    one, two = create(first, b"key one"), create(first, b"\xff\x00 key two")
    assert first.activate_node(one, INTERVAL)
    again = started()
    assert again.get_node_id_by_public_key(b"key one") == one
    assert again.get_node_id_by_public_key(b"\xff\x00 key two") == two
    status = {node.node_id: node.status for node in again.get_node_info()}
    # Who was there and noticed nothing is there still; who never came is not.
    assert status == {one: NodeStatus.ONLINE, two: NodeStatus.REGISTERED}
    assert again.acknowledge_node_heartbeat(one, INTERVAL)
    assert again.activate_node(two, INTERVAL)


def test_who_does_not_send_a_heartbeat_is_soon_let_in_again(started):
    first = started()
    node = create(first, b"key")
    assert first.activate_node(node, INTERVAL)
    again = started()
    assert not again.activate_node(node, INTERVAL)
    until = again.nodes[node].online_until
    assert until == pytest.approx(
        first.nodes[node].online_until - INTERVAL, abs=INTERVAL / 2
    )
    again.nodes[node].online_until -= INTERVAL + 1  # that long later
    assert again.activate_node(node, INTERVAL)


def test_a_revoked_key_is_refused_for_good(started):
    first = started()
    node = create(first, b"key")
    first.activate_node(node, INTERVAL)
    first.delete_node("owner", node)
    again = started()
    assert again.get_node_id_by_public_key(b"key") is None
    assert not again.activate_node(node, INTERVAL)
    with pytest.raises(ValueError, match="already in use"):
        create(again, b"key")


def test_a_run_of_an_earlier_superlink_has_ended(started):
    status = started().get_run_status({7})[7]
    assert (status.status, status.sub_status) == ("finished", "stopped")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"format": 2, "nodes": []}',
        '{"format": 1}',
        '{"format": 1, "nodes": [{"nodeId": "x"}]}',
        '{"format": 1, "nodes": [{"unknown": 1}]}',
        '{"format": 1, "nodes": 5}',
        '{"format": 1, "nodes": [{"\\udfff": 1}]}',
    ],
)
def test_a_damaged_file_is_refused_by_name(started, tmp_path, text):
    (tmp_path / KEPT).write_text(text)
    with pytest.raises(InvalidInputError, match=KEPT):
        started()


def test_only_the_owner_reads_the_file(started, tmp_path):
    create(started(), b"key")
    assert (tmp_path / KEPT).stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / KEPT).read_text())["format"] == 1


def test_a_database_of_an_earlier_version_is_not_dropped_in_silence(tmp_path):
    (tmp_path / "superlink.db").write_bytes(b"SQLite format 3\0")
    link = SuperLink("127.0.0.1:1", tmp_path, None)
    with pytest.raises(InvalidInputError, match="earlier version"):
        link.process()
    (tmp_path / KEPT).write_text('{"format": 1, "nodes": []}')
    assert str(tmp_path / KEPT) in link.process().command
