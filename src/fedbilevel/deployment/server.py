"""The server's process: takes the run's task from the SuperLink, and serves it.

    FEDBILEVEL_TOKEN=... python -m fedbilevel.deployment.server ADDRESS FOLDER RUN [CA]

Flower would start it by its SuperExec, with the task's token on the command line, where
every user of the machine can read it, and would run whatever program the SuperLink
holds. This process asks for the task itself, keeps its token in memory, and serves what
is installed here; settings come from its folder.
"""

import os
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedbilevel.deployment.apps import server_app
from fedbilevel.deployment.guarded_superlink import TOKEN

_LOOK = 0.2  # seconds between two looks for the task


class _Bearer:
    """Brings the token of the SuperLink's guard."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(
        self, context: ProtobufRequestContext, call_next: ProtobufCall
    ) -> httpx.Response:
        """Add the token to a call."""
        add_headers(context.request, {"Authorization": f"Bearer {self.token}"})
        return call_next(context)


def _client(address: str, root: bytes | None, *more: Any) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        address,
        insecure=root is None,
        root_certificates=root,
        interceptors=[RuntimeVersionHttpInterceptor("flwr-serverapp"), *more],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _task_token(client: RuntimeHttpClient, run: int) -> str:
    """Wait for the task of a run; tasks of runs that nobody waits for are dropped."""
    while True:
        asked = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        answer = client.AcquireTask(asked)
        if answer.HasField("task") and answer.task.run_id == run:
            return answer.token
        time.sleep(_LOOK)


def main(arguments: Sequence[str]) -> None:
    """Serve one run to its end."""
    address, folder, run, *certificate = arguments
    bearer = _Bearer(os.environ.pop(TOKEN))
    root = Path(certificate[0]).read_bytes() if certificate else None
    asking = _client(address, root, bearer)
    token = _task_token(asking, int(run))
    asking.close()
    grid = HttpGrid(address, root is None, root, token=token)
    client = _client(address, root, bearer, RuntimeTokenHttpInterceptor(token))
    grid._client = client
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    given = client.PullTaskInput(PullTaskInputRequest())
    grid.set_run(run_from_proto(given.run))
    TaskIdentity.task_id = given.task_id
    TaskIdentity.run_id = given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    context = context_from_proto(given.context)
    project = tomllib.loads((Path(folder) / "app" / "pyproject.toml").read_text())
    context.run_config = project["tool"]["flwr"]["app"]["config"]
    status = SubStatus.FAILED
    try:
        server_app(grid, context)
        status = SubStatus.COMPLETED
    finally:
        _tell(client, status)


def _tell(client: RuntimeHttpClient, status: str) -> None:
    """Tell the SuperLink how the task ended, if it is there."""
    if client._retry_invoker is not None:
        client._retry_invoker.max_tries = 1
    try:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=status))
    except httpx.HTTPError:
        pass  # it notices that nobody works on the task
    finally:
        client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
