"""Who may tell a SuperLink what to do: its operator, and no other user."""

import asyncio
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, ListRunsResponse, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.version import package_version

from fedbilevel.deployment import superlink
from fedbilevel.deployment.guarded_superlink import FLEET, TOKEN, Guard
from fedbilevel.deployment.processes import free_port, wait_for_port
from fedbilevel.deployment.superlink import SuperLink, insisting
from fedbilevel.errors import FedbilevelError, InvalidInputError

NOBODY = 65534
DOWN = subprocess.CompletedProcess([], 1, "connection refused")
VERSION = {
    "flwr-package-name": "flwr",
    "flwr-package-version": package_version,
    "flwr-component-name": "test",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A SuperLink as `federate` starts it, and a run that waits for its server."""
    folder = tmp_path_factory.mktemp("guarded") / "run"
    folder.mkdir()
    link = SuperLink(f"127.0.0.1:{free_port()}", folder, None, remembers=False)
    process = link.process().start()
    try:
        wait_for_port(link.address, process)
        run = link.submit({"experiment": "{}"})
        yield SimpleNamespace(link=link, process=process, run=run, folder=folder)
    finally:
        process.end()


def call(link: SuperLink, path: str, request, **headers: str) -> httpx.Response:
    content = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    return httpx.post(
        f"http://{link.address}{path}",
        content=request.SerializeToString(),
        headers={**content, **VERSION, **headers},
    )


def allowed(link: SuperLink) -> dict[str, str]:
    return {"authorization": f"Bearer {link.token}"}


def runs(link: SuperLink) -> set[int]:
    answer = call(link, "/v1/control/list-runs", ListRunsRequest(), **allowed(link))
    assert answer.status_code == 200
    return set(ListRunsResponse.FromString(answer.content).run_dict)


STRANGERS = {
    "no token": [],
    "another token": [("authorization", "Bearer " + "x" * 43)],
    "no scheme": [("authorization", "{token}")],
    "two tokens": [("authorization", "Bearer {token}"), ("authorization", "Bearer x")],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_run_without_the_token_is_refused_and_not_begun(guarded, stranger):
    link, before = guarded.link, runs(guarded.link)
    content = build_fab_from_disk(guarded.folder / "app")
    fab = fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))
    headers = [(n, v.format(token=link.token)) for n, v in STRANGERS[stranger]]
    answer = httpx.post(
        f"http://{link.address}/v1/control/start-run",
        content=StartRunRequest(fab=fab).SerializeToString(),
        headers=[
            ("content-type", PROTOBUF_MEDIA_TYPE),
            ("accept", PROTOBUF_MEDIA_TYPE),
            *VERSION.items(),
            *headers,
        ],
    )
    assert answer.status_code == 401
    assert runs(link) == before == {guarded.run}


def test_nobody_takes_the_place_of_the_server(guarded):
    # Of a stock SuperLink this call gets the token of the task, and with it the run.
    asked = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    path = "/v1/runtime/acquire-task"
    assert call(guarded.link, path, asked).status_code == 401
    answer = call(guarded.link, path, asked, **allowed(guarded.link))
    told = AcquireTaskResponse.FromString(answer.content)
    assert told.task.run_id == guarded.run and told.token


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/docs", 401),
        ("/openapi.json", 401),
        ("/health", 401),
        ("/v1/control/list-nodes", 401),
        ("/v1/fleet/../control/list-nodes", 404),
        ("//v1/fleet/", 401),
        ("/v1/fleetcontrol", 401),
        ("/v1/fleet/pull-messages", 415),
    ],
)
def test_all_but_the_calls_of_nodes_needs_the_token(guarded, path, status):
    host, _, port = guarded.link.address.rpartition(":")
    # A library would make the path plain before it sends it.
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import socket, sys; one = socket.create_connection(sys.argv[1:3], 10); "
            "one.sendall(sys.stdin.buffer.read()); print(one.recv(99).decode())",
            host,
            port,
        ],
        input=lines.encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert told.stdout.split()[1] == str(status).encode()


def test_the_token_stands_on_no_command_line(guarded):
    held = guarded.folder / "homes" / "flwr" / "credentials.yaml"
    assert held.stat().st_mode & 0o777 == 0o600
    assert guarded.folder.joinpath("homes/flwr").stat().st_mode & 0o777 == 0o700
    place = Path(f"/proc/{guarded.process.running.pid}")
    assert f"{TOKEN}={guarded.link.token}" in (place / "environ").read_text()
    for lines in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert guarded.link.token.encode() not in lines.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
    server = guarded.link.server(guarded.run)
    assert not any(guarded.link.token in word for word in server.command)
    assert guarded.link.token not in repr(guarded.link)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_of_the_machine_cannot_read_the_token(guarded):
    places = [
        guarded.folder / "homes" / "flwr" / "credentials.yaml",
        Path(f"/proc/{guarded.process.running.pid}/environ"),
    ]
    # The folders above are made by the test, and open.
    for above in list(places[0].parents)[3:]:
        above.chmod(above.stat().st_mode | 0o055)
    for place in places:
        assert place.read_bytes()
        done = subprocess.run(
            ["cat", str(place)], user=NOBODY, group=NOBODY, capture_output=True
        )
        assert done.returncode and not done.stdout
        assert b"Permission denied" in done.stderr
    # It reaches the port, and that is all.
    script = (
        "import sys, urllib.request as r, urllib.error as e\n"
        "try: r.urlopen(sys.argv[1], data=b'')\n"
        "except e.HTTPError as error: print(error.code)"
    )
    address = f"http://{guarded.link.address}/v1/control/start-run"
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", script, address],
        user=NOBODY,
        group=NOBODY,
        capture_output=True,
    )
    assert done.stdout.split() == [b"401"]


def status_of(peer: str | None, path: str, token: str) -> int:
    """Return how a guard answers a call from an address; 200 if it passes."""
    sent: list[dict] = []

    async def app(scope, receive, send) -> None:
        await send({"status": 200})

    async def send(message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "path": path,
        "client": (peer, 1) if peer else None,
        "headers": [(b"authorization", f"Bearer {token}".encode())],
    }
    asyncio.run(Guard(app, "secret")(scope, None, send))  # pyright: ignore
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        ("127.0.0.1", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("192.0.2.7", 403),
        ("2001:db8::1", 403),
        ("::ffff:192.0.2.7", 403),
        ("localhost", 403),
        (None, 403),
    ],
)
def test_the_token_is_of_no_use_from_another_machine(peer, status):
    assert status_of(peer, "/v1/control/start-run", "secret") == status
    assert status_of(peer, FLEET + "pull-messages", "wrong") == 200


def outside() -> str | None:
    """Return an address of this machine that is not loopback, if there is one."""
    told = subprocess.run(["hostname", "-I"], capture_output=True, text=True)
    return next((one for one in told.stdout.split() if "." in one), None)


@pytest.mark.slow
@pytest.mark.skipif(outside() is None, reason="needs a network")
def test_a_superlink_open_to_the_network_takes_no_orders_from_it(tmp_path):
    link = SuperLink(f"0.0.0.0:{free_port()}", tmp_path, None, remembers=False)
    process = link.process().start()
    try:
        wait_for_port(link.address, process)
        port = link.address.rpartition(":")[2]
        for host, status in ((str(outside()), 403), ("127.0.0.1", 200)):
            called = SuperLink(f"{host}:{port}", tmp_path, None, token=link.token)
            path = "/v1/control/list-runs"
            answer = call(called, path, ListRunsRequest(), **allowed(link))
            assert answer.status_code == status
    finally:
        process.end()


@pytest.mark.parametrize("host", ["192.0.2.7", "federation.example.org", "::"])
def test_an_address_of_a_network_is_refused(tmp_path, host):
    with pytest.raises(InvalidInputError, match="takes orders from this machine alone"):
        SuperLink(f"{host}:8000", tmp_path, None).process()


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_what_a_superlink_could_not_do_is_asked_again(tmp_path, monkeypatch, failures):
    """It was killed between its start and the first question, in runs with kills."""
    waits, revived = [], []
    monkeypatch.setattr(superlink.time, "sleep", waits.append)
    done = subprocess.CompletedProcess([], 0, '{"run-id": 7}')
    answers = [*failures * [DOWN], done, *failures * [DOWN], done]
    monkeypatch.setattr(SuperLink, "_flwr", lambda *_: answers.pop(0))
    link = SuperLink("127.0.0.1:1", tmp_path, None)

    def revive() -> None:
        revived.append(len(answers))

    insisting(lambda: link.register([tmp_path / "key.pub"]), revive)
    assert insisting(lambda: link.submit({}), revive) == 7 and not answers
    assert len(revived) == 2 * failures + 2
    assert waits == 2 * [0.5 * 2**k for k in range(failures)]


def test_a_superlink_that_never_can_is_an_error_and_a_mistake_is_one_at_once(
    tmp_path, monkeypatch
):
    waits = []
    monkeypatch.setattr(superlink.time, "sleep", waits.append)
    monkeypatch.setattr(SuperLink, "_flwr", lambda *_: DOWN)
    link = SuperLink("127.0.0.1:1", tmp_path, None)
    with pytest.raises(FedbilevelError, match=r"key.pub could not be registered: conn"):
        insisting(lambda: link.register([tmp_path / "key.pub"]), lambda: None)
    assert len(waits) == 5

    def mistaken() -> None:
        raise InvalidInputError("the superlink cannot take part")

    with pytest.raises(InvalidInputError):
        insisting(lambda: None, mistaken)
    assert len(waits) == 5


def test_a_command_of_flower_that_says_nothing_is_a_failure(tmp_path, monkeypatch):
    def silent(command: list[str], **_):
        raise subprocess.TimeoutExpired(command, 120)

    monkeypatch.setattr(subprocess, "run", silent)
    link = SuperLink("127.0.0.1:1", tmp_path, None)
    with pytest.raises(FedbilevelError, match="did not start the run: no answer in"):
        link.submit({})
