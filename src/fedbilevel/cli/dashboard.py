"""Pages of run folders, and a dashboard of them in a browser, on this machine alone.

Every user of the machine reaches its port, so that the address that is printed holds a
token; a browser that brought it once is known by a cookie.
"""

import os
import secrets
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from urllib.parse import parse_qs, unquote, urlsplit

from fedbilevel.errors import CheckpointError, FedbilevelError, sentence_of
from fedbilevel.experiments.run_folder import command_of
from fedbilevel.report.page import write_listing, write_page, write_sentence
from fedbilevel.saved import Saved, find_saved, read_saved

_HERE = "127.0.0.1"
_LIST_SECONDS, _RUN_SECONDS = 5, 10  # until a browser asks again
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# A report brings its own policy, which names the programs it may run.
_NO_FRAMES = "frame-ancestors 'none'"
_NO_PROGRAMS = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {_NO_FRAMES}"
)
_NO_TOKEN = "Ask by the address that `fedbilevel dashboard` printed, with its token."


def page_of(folder: Path, *, refresh: int = 0) -> str:
    """Return the page of a folder; an unfinished one asks to be read again."""
    try:
        saved = read_saved(folder)
        again = refresh if saved.unfinished else 0
        return write_page(saved, command_of(saved), refresh=again)
    except (FedbilevelError, OSError):
        raise
    except Exception as error:  # of whatever somebody wrote into the files
        about = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder} is damaged: {about}.") from error


class Dashboard(ThreadingHTTPServer):
    """Serves the runs of a folder on this machine to holders of its address."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        super().__init__((_HERE, port), _Handler)
        self.name = f"{_HERE}:{self.server_port}"
        self.token = secrets.token_urlsafe(32)
        self.address = f"http://{self.name}/?token={self.token}"
        self.cookie = f"fedbilevel-{self.server_port}"  # ports share their cookies
        # A page of elsewhere whose name was made to mean this machine has another.
        self.names = {self.name, f"localhost:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "fedbilevel", ""
    timeout = 30  # seconds that a silent browser holds a thread

    def do_GET(self) -> None:  # noqa: N802
        """Answer with the list, a report, or why not."""
        if self.headers.get("Host") not in self.server.names:
            self._refuse(HTTPStatus.FORBIDDEN, "Ask for this by its own address.")
            return
        if not any(map(self._is_token, (self._in_address(), self._in_cookie()))):
            self._refuse(HTTPStatus.FORBIDDEN, _NO_TOKEN)
            return
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            listing = _listing(self.server.folder)
            self._answer(HTTPStatus.OK, listing, _NO_PROGRAMS)
            return
        # A requested run is looked up in the listing, never opened by name.
        place = find_saved(self.server.folder).get(path.removeprefix("/run/"))
        if not path.startswith("/run/") or place is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such run.")
            return
        try:
            _require_plain(place)
            page = page_of(place, refresh=_RUN_SECONDS)
        except (FedbilevelError, OSError) as error:
            self._refuse(HTTPStatus.CONFLICT, sentence_of(error))
            return
        self._answer(HTTPStatus.OK, page, _NO_FRAMES)

    def _in_address(self) -> str:
        return parse_qs(urlsplit(self.path).query).get("token", [""])[0]

    def _in_cookie(self) -> str:
        with suppress(CookieError):
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            return found.value if found else ""
        return ""

    def _is_token(self, word: str) -> bool:
        return secrets.compare_digest(word.encode(), self.server.token.encode())

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(status, write_sentence(sentence), _NO_PROGRAMS)

    def _answer(self, status: HTTPStatus, page: str, policy: str) -> None:
        content = page.encode(errors="backslashreplace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Content-Length", str(len(content)))
        if self._is_token(self._in_address()):
            known = f"{self.server.cookie}={self.server.token}"
            strict = "Path=/; HttpOnly; SameSite=Strict"
            self.send_header("Set-Cookie", f"{known}; {strict}")
        self.end_headers()
        # A browser that asks again does not wait for what it asked for before.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal belongs to its user."""


def _listing(folder: Path) -> str:
    runs: dict[str, Saved | str] = {}
    for name, place in find_saved(folder).items():
        try:
            _require_plain(place)
            runs[name] = read_saved(place)
        except Exception as error:  # what one folder holds must not hide the others
            runs[name] = sentence_of(error)
    return write_listing(folder.resolve().name, runs, _LIST_SECONDS)


def _require_plain(folder: Path) -> None:
    """Raise if something in a folder lies elsewhere, or never ends.

    A link would be shown from there, and a pipe would be waited for.
    """
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = (Path(place) / name).lstat().st_mode
            if not (S_ISREG(mode) or S_ISDIR(mode)):
                what = "a link" if S_ISLNK(mode) else "no file"
                raise CheckpointError(f"{folder.name} holds {what}, {name}.")
