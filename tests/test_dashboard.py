"""The dashboard shows the runs of its folder to this machine, and nothing else."""

import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel._files import read_arrays, write_arrays
from fedbilevel.cli.app import app
from fedbilevel.cli.dashboard import Dashboard
from fedbilevel.report.page import write_listing
from fedbilevel.saved import Saved
from tests.browser import needs_chromium, opened
from tests.reports import HOSTILE, Read, made_up, save_comparison, save_run
from tests.test_report import unfinished


@pytest.fixture
def runs(tmp_path) -> Path:
    folder = tmp_path / "runs"
    save_run(folder / "first run", made_up("one"))
    save_comparison(folder / "deep" / "compared", {"one": 1, "two": 2}, seeds=1)
    unfinished(folder / "going")
    save_run(folder / "broken", made_up("one"))
    (folder / "broken" / "result.json").write_text(f'"{HOSTILE[:20]}"')
    secret = save_run(tmp_path / "secret", made_up("stowaway"))
    (folder / "link").symlink_to(secret)
    return folder


@pytest.fixture
def served(runs) -> Iterator[Dashboard]:
    with Dashboard(runs, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(
    server: Dashboard,
    path: str,
    host: str | None = None,
    method: str = "GET",
    cookie: str | None = None,
):
    """Ask for a path; `cookie` is that of a browser which was there, if left out."""
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    known = f"{server.cookie}={server.token}" if cookie is None else cookie
    try:
        link.putrequest(method, path, skip_host=host is not None)
        link.putheader("Cookie", known)
        if host:
            link.putheader("Host", host)
        link.endheaders()
        answer = link.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        link.close()


def test_it_lists_all_runs_with_their_state(served):
    status, headers, text = get(served, "/")
    page = Read(page=text)
    assert status == 200
    links = [about["href"] for tag, about in page.elements if tag == "a"]
    assert links == ["/run/deep/compared", "/run/first%20run", "/run/going"]
    assert page.texts.count("not finished") == 1
    assert page.texts.count("finished") == 2
    assert "result.json is damaged" in page.text
    assert not any(tag == "script" for tag, _ in page.elements)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ("http-equiv", "refresh") in [i for _, a in page.elements for i in a.items()]


def test_it_writes_reports_when_asked_also_of_what_is_not_finished(served):
    status, headers, text = get(served, "/run/first%20run")
    assert status == 200 and headers["Cache-Control"] == "no-store"
    assert "one on numbers" in Read(page=text).text
    assert '"refresh"' not in text.split("<style>")[0]
    status, _, text = get(served, "/run/going")
    assert status == 200 and "Not finished" in Read(page=text).text
    assert '"refresh"' in text.split("<style>")[0]
    status, _, text = get(served, "/run/broken")
    assert status == 409 and "is damaged" in text


@pytest.mark.parametrize(
    "path",
    [
        *("/run/../secret", "/run/%2e%2e/secret", "/run/..%2fsecret", "/run/link"),
        *("//etc/passwd", "/run//etc/passwd", "/run/", "/run", "/first%20run"),
        *("/run/first%20run/result.json", "/run/first%20run%00", "/run/.", "/run/deep"),
    ],
)
def test_only_what_is_listed_is_served(served, path):
    status, _, text = get(served, path)
    assert status == 404
    assert "stowaway" not in text and "numbers" not in text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_page_of_elsewhere_cannot_ask_by_another_name(served, host):
    status, _, text = get(served, "/", host=host)
    assert status == 403 and "first run" not in text


def test_it_listens_on_this_machine_alone_and_only_answers(served):
    assert served.server_address[0] == "127.0.0.1"
    for name in served.names:
        assert get(served, "/", host=name)[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert get(served, "/", method=method)[0] == 501


ROUTES = ("/", "/run/first%20run", "/run/going", "/run/broken", "/run/none", "/x", "")
WRONG = ("", "{}", "{}x", "x{}", "\0", "\u00e9", "' or 1=1")


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_is_answered_without_the_token(served, path):
    """Neither a page nor whether there is one."""
    token, name = served.token, served.cookie
    pages = {get(served, path, cookie="")[2]}
    for one in WRONG:
        word = quote(one.replace("{}", token[:-1]))
        asked = [(f"{path}?token={word}", ""), (path, f"{name}={word}")]
        asked += [(path, f"x={token}")]
        for address, cookie in asked:
            status, headers, text = get(served, address, cookie=cookie)
            assert status == 403 and "Set-Cookie" not in headers
            pages.add(text)
    assert len(pages) == 1 and "token" in pages.pop()
    assert token not in get(served, "/")[2]


def test_the_address_that_is_printed_makes_a_browser_known(served):
    assert len(served.token) >= 43 and served.address.endswith(f"?token={served.token}")
    path = served.address.partition(served.name)[2]
    status, headers, _ = get(served, path, cookie="")
    assert status == 200
    cookie, *rules = headers["Set-Cookie"].split("; ")
    assert set(rules) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert get(served, "/run/going", cookie=cookie)[0] == 200
    assert get(served, f"/run/going?token={served.token}", cookie="")[0] == 200
    with Dashboard(served.folder, 0) as other:
        assert other.token != served.token


def test_tokens_are_compared_in_constant_time(served, monkeypatch):
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return False

    monkeypatch.setattr("fedbilevel.cli.dashboard.secrets.compare_digest", compare)
    assert get(served, "/?token=a", cookie=f"{served.cookie}=b")[0] == 403
    assert {b"a", served.token.encode()} in compared
    assert {b"b", served.token.encode()} in compared


@pytest.mark.parametrize("linked", ["result.json", "deep/inside", "folder"])
def test_what_is_linked_from_a_run_is_not_shown(served, runs, linked):
    place, secret = runs / "first run" / linked, runs.parent / "secret"
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(secret if linked == "folder" else secret / "result.json")
    status, _, text = get(served, "/run/first%20run")
    assert status == 409 and "holds a link" in text and "stowaway" not in text
    status, _, text = get(served, "/")
    assert status == 200 and "holds a link" in text and "stowaway" not in text


ODD = {
    "round": lambda place: change_column(place, "round", np.nan),
    "endless": lambda place: change_column(place, "round", np.inf),
    "bytes": lambda place: change_result(place, "counts", {"bytes_up": None}),
    "versions": lambda place: change_result(place, "versions", 3),
    "algorithm": lambda place: change_result(place, "algorithm", []),
}


def change_column(place: Path, name: str, value: float) -> None:
    columns = read_arrays(place / "columns.npz")
    columns[name] = columns[name].astype(float)
    columns[name][-1] = value
    write_arrays(place / "columns.npz", columns)


def change_result(place: Path, name: str, value: object) -> None:
    path = place / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


@pytest.mark.parametrize("odd", ODD)
def test_one_folder_of_odd_numbers_does_not_hide_the_others(served, runs, odd):
    ODD[odd](save_run(runs / "odd", made_up("one")))
    status, _, text = get(served, "/")
    assert status == 200 and "/run/first%20run" in text and "odd" in text
    status, _, text = get(served, "/run/odd")
    assert status == 409 and "is damaged" in text


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(
    served, runs, monkeypatch
):
    for name in (b"no text \xff", b"closed", b"text", b"pipe"):
        save_run(Path(os.fsdecode(os.fsencode(runs) + b"/" + name)), made_up("one"))
    change_result(runs / "text", "algorithm", "x\ud800")
    (runs / "pipe" / "columns.npz").unlink()
    os.mkfifo(runs / "pipe" / "columns.npz")
    asked = {}

    def access(place, mode):
        asked[place.name] = mode
        return place.name != "closed"  # root may open all

    monkeypatch.setattr("fedbilevel.saved.os.access", access)
    status, _, text = get(served, "/")
    assert status == 200 and "/run/first%20run" in text and "holds no file" in text
    assert "closed" not in text and asked["closed"] == os.R_OK | os.X_OK
    assert get(served, "/run/text")[0] in (200, 409)
    assert get(served, "/run/pipe")[0] == 409


def test_a_line_that_cannot_be_written_says_so():
    result = made_up("one")
    columns = {**result.columns, "round": np.full(12, np.nan)}
    odd = Saved("odd", {"one": [made_up("one", columns=columns)]}, "upper_loss")
    fine = Saved("fine", {"one": [result]}, "upper_loss")
    page = write_listing("runs", {"odd": odd, "fine": fine}, 0)
    assert "it is damaged: ValueError" in page and "/run/fine" in page


def test_a_port_in_use_and_no_folder_are_told(served, tmp_path):
    invoke, port = CliRunner().invoke, str(served.server_port)
    done = invoke(app, ["dashboard", str(tmp_path), "--port", port])
    assert done.exit_code == 2 and f"port {port} is in use" in done.output
    done = invoke(app, ["dashboard", str(tmp_path / "nothing")])
    assert done.exit_code == 2 and "is not a folder" in done.output.replace("\n", " ")


@needs_chromium
def test_a_browser_goes_from_the_list_to_a_report(served):
    with opened(offline=False) as page:
        address = f"http://{served.name}/"
        page.open(served.address, width=400)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.evaluate("document.querySelector('a[href$=compared]').click()")
        page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        assert page.complaints == []
        assert page.requests == [served.address, f"{address}run/deep/compared"]
        # The cookie is enough for what a browser asks for by itself.
        assert page.evaluate("document.cookie") == ""
