"""Flower's side of a server: its SuperLink, its commands, and the app it is given."""

import base64
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from flwr.cli import constant
from flwr.common.constant import AuthnType
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedbilevel._files import make_private_folder, write_atomically
from fedbilevel.deployment.processes import TOKEN, Process, called_at, tied
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.federation.flower.messages import fingerprint
from fedbilevel.federation.signatures import read_public_key

KEPT = "superlink.json"  # of the SuperLink, by number and key
_DATABASE = "superlink.db"  # what it had before
_CONNECTION = "federation"
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before it is asked again
_LONGEST = 120  # seconds that one of Flower's commands has
T = TypeVar("T")
_LOCAL = ("127.0.0.1", "localhost", "0.0.0.0")
_PROJECT = """\
[project]
name = "fedbilevel-app"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "fedbilevel"

[tool.flwr.app.components]
serverapp = "fedbilevel_app.apps:server_app"
clientapp = "fedbilevel_app.apps:client_app"

[tool.flwr.app.config]
"""
_APPS = '''"""The apps of an experiment; all of it is in the installed package."""

from fedbilevel.deployment import apps

client_app = apps.client_app
server_app = apps.server_app
'''


def program(name: str) -> str:
    """Return a command that was installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def insisting(ask: Callable[[], T], revive: Callable[[], object]) -> T:
    """Ask a SuperLink again while it fails, after longer and longer waits.

    It may have been ended meanwhile; `revive` starts it then. Mistakes of the user are
    raised at once, and other errors in the end.
    """
    for seconds in _WAITS:
        try:
            revive()
            return ask()
        except InvalidInputError:
            raise
        except FedbilevelError:
            time.sleep(seconds)
    revive()
    return ask()


def key_of(path: Path) -> str:
    """Return the fingerprint of a node's public key in a file of ssh-keygen."""
    return fingerprint(public_key_to_bytes(read_public_key(path)))


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink at an address, with certificates or without.

    `certificates` is a folder with ca.crt, server.pem and server.key; with it nodes
    must have a registered key. `folder` is where our app is and, if it `remembers`, a
    file of its nodes; else nodes that it forgot in a restart come again. Clients other
    than nodes need the `token`: it is handed to our processes, and to Flower's
    commands, which send it if it is in their home.
    """

    address: str
    folder: Path
    certificates: Path | None
    remembers: bool = True
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def process(self) -> Process:
        """Return the SuperLink behind its guard, not started yet."""
        _, port = called_at(self.address)  # or what is wrong with it
        host = self.address.rpartition(":")[0]
        if host not in _LOCAL:
            # Our own processes would come from there, and be refused by the guard.
            raise InvalidInputError(
                f"address '{self.address}': the SuperLink takes orders from this "
                "machine alone. Listen at 127.0.0.1, behind the proxy of the guide, or "
                "at 0.0.0.0."
            )
        where = ["--host", host, "--port", str(port)]
        kept = ["--database", str(self._nodes())] if self.remembers else []
        # All that our app needs is installed; nothing is to be fetched for a run.
        kept += ["--disable-runtime-dependency-installation"]
        # Flower's own start of a ServerApp shows the task's token to everybody.
        kept += ["--isolation", "process"]
        command = [sys.executable, "-m", "fedbilevel.deployment.guarded_superlink"]
        command += [*where, *kept, *self._security()]
        return Process("superlink", command, self.folder, {TOKEN: self.token})

    def _nodes(self) -> Path:
        file, old = (self.folder.resolve() / name for name in (KEPT, _DATABASE))
        if old.exists() and not file.exists():
            raise InvalidInputError(
                f"{old} is of an earlier version, and is not read any more. If no key "
                "was unregistered there, remove it, and nodes will come again. Else "
                "serve in a new folder, without those keys."
            )
        return file

    def server(self, run: int) -> Process:
        """Return the server of a run, not started yet."""
        command = [sys.executable, "-m", "fedbilevel.deployment.apps"]
        command += [self._local, str(self.folder.resolve()), str(run)]
        if self.certificates is not None:
            command += [str(self.certificates.resolve() / "ca.crt")]
        return Process("serverapp", command, self.folder, {TOKEN: self.token})

    @property
    def _local(self) -> str:
        """The address by which processes of this machine call it."""
        return "{}:{}".format(*called_at(self.address))

    def _security(self) -> list[str]:
        if self.certificates is None:
            return ["--insecure"]
        names = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.pem"}
        names |= {"--ssl-keyfile": "server.key"}
        options = ["--enable-supernode-auth"]
        for option, name in names.items():
            path = self.certificates.resolve() / name
            if not path.exists():
                raise InvalidInputError(
                    f"{path} does not exist. The folder of certificates needs ca.crt, "
                    "server.pem and server.key. The guide shows how to make them."
                )
            options += [option, str(path)]
        return options

    def register(self, keys: Sequence[Path]) -> None:
        """Register the public keys of nodes; those that are known already stay so."""
        for key in keys:
            done = self._flwr("supernode", "register", str(key.resolve()), _CONNECTION)
            if done.returncode and "already" not in done.stdout:
                raise FedbilevelError(
                    f"{key} could not be registered: {done.stdout[-500:]}"
                )

    def submit(self, settings: Mapping[str, str | float | int]) -> int:
        """Start a run of our ServerApp; return its number."""
        self._write_app(settings)
        app = str(self.folder.resolve() / "app")
        done = self._flwr("run", app, _CONNECTION, "--format", "json")
        try:
            answer = json.loads(done.stdout[done.stdout.index("{") :])
            return int(answer["run-id"])
        except (ValueError, KeyError) as error:
            raise FedbilevelError(
                f"the SuperLink did not start the run: {done.stdout[-1000:]}"
            ) from error

    def stop(self, run: int) -> None:
        """End a run, if it has not ended yet."""
        self._flwr("stop", str(run), _CONNECTION)

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run one of Flower's commands against this SuperLink."""
        client = Process("flwr", [program("flwr"), *arguments], self.folder)
        root = self.certificates
        secure = f'root-certificates = "{root.resolve()}/ca.crt"' if root else ""
        config = (
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "{self._local}"\n{secure or "insecure = true"}\n'
        )
        make_private_folder(client.home)
        held = {"config.toml": config, "credentials.yaml": self._credentials()}
        for name, text in held.items():
            write_atomically(client.home / name, text, mode=0o600)
        try:
            return subprocess.run(
                tied(client.command),
                env=client.environment(),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_LONGEST,
            )
        except subprocess.TimeoutExpired:
            silent = f"no answer in {_LONGEST} seconds"
            return subprocess.CompletedProcess(client.command, 1, silent)

    def _credentials(self) -> str:
        """Return the token as Flower's commands keep one after `flwr login`."""
        held = {
            constant.AUTHN_TYPE_STORE_KEY: AuthnType.OIDC,
            constant.ACCESS_TOKEN_STORE_KEY: self.token,
            constant.REFRESH_TOKEN_STORE_KEY: self.token,
        }
        coded = {k: base64.b64encode(text.encode()) for k, text in held.items()}
        return json.dumps({k % self._local: one.decode() for k, one in coded.items()})

    def _write_app(self, settings: Mapping[str, str | float | int]) -> None:
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        files = {
            "pyproject.toml": _PROJECT + "\n".join(lines) + "\n",
            "fedbilevel_app/__init__.py": '"""An app of fedbilevel."""\n',
            "fedbilevel_app/apps.py": _APPS,
        }
        for name, text in files.items():
            write_atomically(self.folder / "app" / name, text)
