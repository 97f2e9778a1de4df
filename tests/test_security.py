"""Who is let in, what may be called, and what never leaves a site."""

import shutil
import signal
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPSConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app
from flwr.supernode import fleet_http_connection, node_auth_http_interceptor
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedbilevel._files import read_arrays
from fedbilevel.deployment import apps
from fedbilevel.deployment.processes import Process, free_port, wait_for_port
from fedbilevel.deployment.superlink import SuperLink, key_of
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.federation.flower.messages import (
    Assembly,
    as_content,
    piece_objects,
    push_objects,
    record_in,
)
from fedbilevel.federation.flower.node import Connection, serve_packets
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.signatures import KeyFiles, server_seal, site_seal
from fedbilevel.federation.wire import CHECKSUM, EVERYONE, Header, pack, unpack
from tests.gateway import BLOCK, RULE, Gateway, forwards, make_certificates, make_key
from tests.planted import assert_plain_arrays, settings, shared_values, sites_with_rows


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A SuperLink with TLS that knows the keys of three nodes, and no other."""
    folder = tmp_path_factory.mktemp("secured")
    certificates = make_certificates(folder / "certificates")
    link = SuperLink(f"127.0.0.1:{free_port()}", folder / "run", certificates)
    keys = [make_key(folder / name) for name in ("node0", "node1", "node2")]
    own = make_key(folder / "server")
    link.folder.mkdir()
    process = link.process()
    process.more["XDG_CACHE_HOME"] = str(folder / "cache")
    process.start()
    try:
        wait_for_port(link.address, process)
        link.register([key.with_suffix(".pub") for key in keys])
        peers = tuple(key.with_suffix(".pub") for key in keys)
        yield SimpleNamespace(
            link=link,
            folder=folder,
            keys=keys,
            root=certificates / "ca.crt",
            sealing=KeyFiles(own, peers[:2]),
            seals=[
                KeyFiles(key, (own.with_suffix(".pub"),))
                for key in [*keys[:2], keys[0]]
            ],
        )
    finally:
        process.end()


def come(connection: Connection) -> list[str]:
    """Return what a node says until it is let in; raise if it is not."""
    said: list[str] = []
    serve_packets(
        connection,
        lambda packet: b"",
        largest=1 << 20,
        asked_to_stop=lambda: any(text.startswith("node ") for text in said),
        report=said.append,
    )
    return said


def refusal(connection: Connection) -> str:
    said: list[str] = []
    with pytest.raises(FedbilevelError, match="did not let this node in"):
        serve_packets(
            connection,
            lambda packet: b"",
            largest=1 << 20,
            asked_to_stop=lambda: False,
            report=said.append,
        )
    # Flower ends a process that it could not connect, even if its exit was caught.
    assert not [one for one in threading.enumerate() if "force_exit" in one.name]
    return said[0]


def test_a_registered_node_gets_in_and_may_come_again(secured):
    address, root, key = secured.link.address, secured.root, secured.keys[0]
    connection = Connection(address, root, key, patience=0)
    assert come(connection) == come(connection)


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        ("a key that is not registered", "waiting for the server to admit this key"),
        ("no key", "2001"),
        ("another authority", "CERTIFICATE_VERIFY_FAILED"),
        ("no encryption", "no connection"),
    ],
)
def test_others_are_refused(secured, stranger, reason, tmp_path):
    root, key = secured.root, secured.keys[0]
    if stranger == "a key that is not registered":
        key = make_key(tmp_path / "other")
    elif stranger == "no key":
        key = None
    elif stranger == "another authority":
        root = make_certificates(tmp_path / "others") / "ca.crt"
    else:
        root = None
    said = refusal(Connection(secured.link.address, root, key, patience=0))
    assert reason in said
    # At a normal start a key is registered a moment later.
    assert ("refuses" in said) == (stranger == "no key")


def test_a_node_with_a_wrong_clock_is_told_and_not_interrupted(secured, monkeypatch):
    interrupted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
    late = datetime.now(UTC) - timedelta(hours=1)
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: late)
    try:
        address, root, key = secured.link.address, secured.root, secured.keys[0]
        assert "401" in refusal(Connection(address, root, key, patience=0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interrupted


def test_a_public_key_that_is_none_is_told_at_once(secured, tmp_path):
    (tmp_path / "wrong.pub").write_text("no key")
    for path in (tmp_path / "wrong.pub", tmp_path / "missing.pub", secured.keys[0]):
        with pytest.raises(InvalidInputError, match="cannot be read as a public key"):
            key_of(path)


def test_an_authority_that_is_none_is_told_at_once(tmp_path):
    (tmp_path / "ca.crt").write_text("no certificate")
    (tmp_path / "empty.crt").touch()
    for path in (tmp_path / name for name in ("ca.crt", "empty.crt", "missing.crt")):
        with pytest.raises(InvalidInputError, match="cannot be read as a certificate"):
            come(Connection("127.0.0.1:1", path))


class _Paths(FleetHttpClient):
    """Tells which paths a node calls."""

    def _unary_unary(self, *, path: str, **more):  # pyright: ignore[reportIncompatibleMethodOverride]
        del more
        return path


def test_the_proxy_forwards_what_nodes_call_and_nothing_else():
    calls = [name for name in vars(FleetHttpClient) if name[0].isupper()]
    client = _Paths("http://unused")
    called = {getattr(client, name)(None) for name in calls}
    client.close()
    assert len(called) == len(calls) > 10
    assert {path for path in called if forwards(path) == path} == called
    routes = iter_route_contexts(create_app().routes)
    served = {route.path for route in routes if route.path}
    assert called < served
    assert {path for path in served if forwards(path)} == called
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"} < served
    # With a path of its own nginx forwards what it compared, not what it was sent.
    assert "proxy_pass https://127.0.0.1:8000/v1/fleet/;" in RULE["/v1/fleet/"]


DETOURS = [
    "/v1/control/list-nodes",
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet/..%2fcontrol%2flist-nodes",
    "//v1/control/list-nodes",
    "/V1/fleet/../control/list-nodes",
    "/v1/fleetcontrol",
]


def status_of(address: str, path: str, root: Path) -> int:
    trust = ssl.create_default_context(cafile=root)
    caller = HTTPSConnection(address, context=trust, timeout=30)
    try:
        caller.request("POST", path, b"", {"content-type": PROTOBUF_MEDIA_TYPE})
        return caller.getresponse().status
    finally:
        caller.close()


def test_detours_are_refused(secured):
    assert not any(map(forwards, DETOURS))
    # Who passes the rule, by an account on the server's host, meets the guard.
    assert status_of(secured.link.address, DETOURS[0], secured.root) == 401


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_does_what_the_rule_says(secured, tmp_path):
    port = free_port()
    block = BLOCK.replace("listen 8443", f"listen 127.0.0.1:{port}")
    block = block.replace("/etc/fedbilevel/certificates", str(secured.root.parent))
    block = block.replace("127.0.0.1:8000", secured.link.address)
    parts = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{part}_temp_path {tmp_path}/{part};" for part in parts)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{block}}}\n"
    )
    options = ["-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    nginx = Process("nginx", ["nginx", *options], tmp_path).start()
    try:
        wait_for_port(f"127.0.0.1:{port}", nginx)
        address = f"127.0.0.1:{port}"
        for path in (*DETOURS, "/", "/docs", "/v1/runtime/acquire-task"):
            assert status_of(address, path, secured.root) == 403
        come(Connection(address, secured.root, secured.keys[1], patience=0))
    finally:
        nginx.end()


@pytest.fixture
def nodes():
    """Start nodes in threads; they end with the test."""
    stop, threads = threading.Event(), []

    def start(
        connection: Connection,
        handle: Callable[[Any], bytes],
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        threads.append(
            threading.Thread(
                target=serve_packets,
                args=(connection, handle),
                kwargs={
                    "largest": 1 << 20,
                    "asked_to_stop": stop.is_set,
                    "report": report,
                },
            )
        )
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def wait_for_result(folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not (folder / "result.json").exists():
        assert not (folder / apps.ERROR).exists(), (folder / apps.ERROR).read_text()
        assert time.monotonic() < end, "no result in time"
        time.sleep(0.2)


def run_settings(secured, folder: Path) -> dict:
    """Return the settings of a run of two clients, by their keys."""
    keys = tuple(key_of(path) for path in secured.sealing.peers)
    terms = Terms(deadline=60, patience=120, keys=keys)
    experiment = settings("regularization")
    return apps.Served(experiment, folder, terms, secured.sealing).config()


@pytest.mark.slow
def test_rows_stay_where_they_are(secured, nodes, tmp_path):
    """A federation over TLS, keys and the guide's proxy, which records all of it."""
    sites, rows = sites_with_rows(tmp_path, "regularization")
    # The third is client 0 by all but its key: it has even the key of its packets.
    own = settings("regularization", data=str(tmp_path / "rows0"))
    sites.append(build_site(own, 0, folder=tmp_path / "state2"))
    folder = secured.link.folder
    with Gateway(secured.link.address, secured.root.parent) as gateway:
        for number, (site, key) in enumerate(zip(sites, secured.keys, strict=True)):
            site.seal = site_seal(site.client, secured.seals[number])
            nodes(Connection(gateway.address, secured.root, key), site.handle)
        run = secured.link.submit(run_settings(secured, folder))
        server = secured.link.server(run).start()
        try:
            wait_for_result(folder, 150)
        finally:
            server.end()
        assert status_of(gateway.address, DETOURS[0], secured.root) == 403
    traffic = b"\0".join(gateway.recorded)
    # The first exchange is the measurement of the curvature.
    attended = read_arrays(folder / "attendance.npz")["attendance"].tolist()
    assert attended == [[1, 1]] * 3
    assert rows.found_below(tmp_path / "rows0") and rows.found_below(tmp_path / "rows1")
    assert not rows.found_in(traffic) and not rows.found_below(folder)
    assert shared_values(folder).found_in(traffic)
    log = (folder / apps.LOG).read_text()
    assert log.count("is not taken: key: says it is client 0") == 1
    assert log.count("client 0 is at node") == 1
    assert_plain_arrays(folder)


class Instructor:
    """A registered node that speaks to another one as if it were the server.

    Flower asks it for its key, but not whether it is the sender that its message names.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def instruct(self, victim: int, make: Callable[[bytes], bytes]) -> None:
        """Wait for the server's hello, and push what is made of it to a node."""
        own, root = self.connection, self.connection.authority()
        with fleet_http_connection.http_request_response(
            own.superlink, root is None, root, own.keys()
        ) as calls:
            _, receive, send, _, _, pull, push, _ = calls
            while (received := receive()) is None:
                time.sleep(0.1)
            run = received[0].metadata.run_id
            (name,) = piece_objects(received[1])
            found = pull_objects([name], lambda one: pull(run, one))
            hello = Assembly([name], 1 << 20).filled(lambda one: record_in(found[one]))
            assert not isinstance(hello, RefusedError)
            content = as_content(make(bytes(hello)))
            forged = Message(content, reply_to=received[0])
            forged.metadata.__dict__.update(
                _src_node_id=SUPERLINK_NODE_ID,
                _dst_node_id=victim,
                _reply_to_message_id="",
            )
            forged.metadata.__dict__["_message_id"] = forged.object_id
            with no_object_id_recompute():
                tree, objects = get_object_tree(forged), get_all_nested_objects(forged)
                wanted, session = send(forged, tree, 0.0)
                assert wanted, "Flower did not take the message"
                push_objects(
                    objects, wanted, lambda name, what: push(run, session, name, what)
                )


@pytest.mark.slow
def test_a_registered_node_cannot_instruct_another(secured, nodes, tmp_path):
    """One packet with attempt 2**50, pushed through a real SuperLink, is refused."""
    sites, _ = sites_with_rows(tmp_path, "regularization")
    said: list[str] = []
    attacked = threading.Event()
    answers: list[bytes] = []

    def handle(packet: bytes) -> bytes:
        answer = sites[0].handle(packet)
        if packet.startswith(b"FBL") and b'"attempt":%d,' % 2**50 in packet:
            answers.append(answer)
            attacked.set()
        return answer

    def wait_and_handle(packet: bytes) -> bytes:
        if b'"kind":"exchange"' in packet:
            assert attacked.wait(60), "the forged packet did not come"
        return sites[1].handle(packet)

    def forge(hello: bytes) -> bytes:
        # All that a node knows: the header of what it was sent itself.
        header, _, _ = unpack(hello, 1 << 20, site_seal(1, secured.seals[1]))
        return pack(replace(header, client=EVERYONE, attempt=2**50), seal=CHECKSUM)

    for client, respond in enumerate((handle, wait_and_handle)):
        sites[client].seal = site_seal(client, secured.seals[client])
        connection = Connection(
            secured.link.address, secured.root, secured.keys[client]
        )
        nodes(connection, respond, said.append if client == 0 else lambda text: None)
    folder = tmp_path / "run"
    folder.mkdir()
    while not said:
        time.sleep(0.1)
    run = secured.link.submit(run_settings(secured, folder))
    own = Connection(secured.link.address, secured.root, secured.keys[2])
    server = secured.link.server(run).start()
    try:
        Instructor(own).instruct(int(said[0].split()[1]), forge)
        wait_for_result(folder, 150)
    finally:
        server.end()
    (answer,) = answers
    header: Header = unpack(answer, 1 << 20, server_seal(secured.sealing))[0]
    assert (header.kind, (header.info or {})["reason"]) == ("refused", "signature")
    attended = read_arrays(folder / "attendance.npz")["attendance"].tolist()
    assert attended == [[1, 1]] * 3
    (held,) = sites[0].checkpoints.values()
    assert held.newest.attempt == 1
