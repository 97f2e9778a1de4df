"""Flower's SuperLink, with a guard before all that is not for nodes.

    FEDBILEVEL_TOKEN=... python -m fedbilevel.deployment.guarded_superlink OPTIONS

takes the options of `flower-superlink`; its `--database` is the file of `kept_nodes`.
Flower's control and runtime APIs have no authentication: any client of the port can
start a program on the server, or take the place of the ServerApp. Here all but the
Fleet API answers only calls from this machine that bring the token; nodes come from
outside, and are known by their keys.
"""

import hmac
import ipaddress
import os
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink

from fedbilevel.deployment.kept_nodes import keep_only_nodes
from fedbilevel.deployment.processes import TOKEN
from fedbilevel.errors import InvalidInputError

FLEET = "/v1/fleet/"  # what nodes call


class Guard:
    """Refuses calls outside the Fleet API, unless they are local and bring the token.

    It compares the very path by which the application finds a route, and is asked
    before anything of Flower's reads the call.
    """

    def __init__(self, app: Callable, token: str) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        """Pass a call on, or refuse it."""
        status = None if scope["type"] == "lifespan" else self._refusal(scope)
        if status is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            text = f"{status.value} {status.phrase}: not for nodes\n".encode()
            kind = (b"content-type", b"text/plain")
            await send(
                {"type": "http.response.start", "status": status, "headers": [kind]}
            )
            await send({"type": "http.response.body", "body": text})
        else:
            await send({"type": "websocket.close"})

    def _refusal(self, scope: Any) -> HTTPStatus | None:
        if scope["type"] == "http" and scope["path"].startswith(FLEET):
            return None
        if not _is_local(scope.get("client")):
            return HTTPStatus.FORBIDDEN
        if not self._brings_token(scope["headers"]):
            return HTTPStatus.UNAUTHORIZED
        return None

    def _brings_token(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)


def _is_local(peer: tuple[str, int] | None) -> bool:
    try:
        address = ipaddress.ip_address(peer[0] if peer else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def main() -> None:
    """Run the SuperLink with the options of the command line."""
    token = os.environ.pop(TOKEN, "")
    if not token:
        raise InvalidInputError(f"the variable {TOKEN} holds no token.")
    guard = extensions.Middleware(Guard, token=token)  # pyright: ignore[reportPrivateImportUsage]
    # Flower's own place for whatever comes before all else.
    setattr(extensions, "get_middleware", lambda: (guard,))  # noqa: B010
    keep_only_nodes()
    flower_superlink()


if __name__ == "__main__":
    main()
