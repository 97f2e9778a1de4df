"""Files of a federation: who may read them, and what happens where none can be."""

import errno
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import _files
from fedbilevel.cli.app import app
from fedbilevel.cli.output import write_report
from fedbilevel.deployment import apps
from fedbilevel.errors import DamagedFileWarning, sentence_of
from fedbilevel.federation.checkpoints import SiteCheckpoints
from fedbilevel.federation.secure.cohorts import Cohorts
from fedbilevel.federation.secure.site import SiteSecrets
from fedbilevel.result import Result
from tests.reports import made_up, save_run

NODE = (
    "node quadratic --clients 2 --client 0 --superlink 127.0.0.1:1 --insecure --trial"
)


def invoke(*words: object):
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})


def modes_below(folder: Path) -> set[tuple[str, int]]:
    """Return the kinds and permissions of a folder and all that it holds."""
    return {
        ("folder" if one.is_dir() else "file", one.stat().st_mode & 0o777)
        for one in (folder, *folder.rglob("*"))
    }


@pytest.fixture
def occupied():
    """An address where somebody listens, so that no server is started."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield f"127.0.0.1:{one.getsockname()[1]}"


@pytest.mark.parametrize("made_before", [False, True])
def test_the_folder_of_a_server_is_its_own(tmp_path, occupied, made_before):
    out = tmp_path / "run"
    if made_before:
        out.mkdir(mode=0o755)
    words = ("--insecure", "--address", occupied, "--out", out)
    done = invoke("serve", "quadratic", "--clients", 2, *words)
    assert done.exit_code == 2 and "somebody listens" in done.output
    assert modes_below(out) == {("folder", 0o700), ("file", 0o600)}


def test_what_a_site_keeps_is_its_own(tmp_path):
    start = {"x": np.zeros(3)}
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    kept = SiteCheckpoints(start, folder, "f", 0)  # pyright: ignore[reportArgumentType]
    kept.put(1, start, 0)  # pyright: ignore[reportArgumentType]
    kept.save()
    assert modes_below(folder) == {("folder", 0o700), ("file", 0o600)}


def test_the_results_of_a_plain_run_are_as_open_as_the_user_wants(tmp_path):
    before = os.umask(0o022)
    try:
        _files.write_atomically(tmp_path / "open", lambda file: file.write(b""))
        os.umask(0o027)
        _files.write_atomically(tmp_path / "group", lambda file: file.write(b""))
        with _files.private_files():
            _files.write_atomically(tmp_path / "own", lambda file: file.write(b""))
        _files.write_atomically(tmp_path / "again", lambda file: file.write(b""))
    finally:
        os.umask(before)
    modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()}
    assert modes == {"open": 0o644, "group": 0o640, "own": 0o600, "again": 0o640}


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_report_of_a_closed_folder_is_closed(tmp_path, mode):
    """Whoever writes it, after a run or by a command of its own, there or elsewhere."""
    folder = save_run(tmp_path / "run", made_up("one"))
    folder.chmod(mode)
    before = os.umask(0o022)
    try:
        write_report(folder)
        modes = {(folder / "report.html").stat().st_mode & 0o777}
        elsewhere = tmp_path / "elsewhere.html"
        for more in ((), ("--out", elsewhere)):
            assert invoke("report", folder, *more).exit_code == 0
        modes |= {(folder / "report.html").stat().st_mode & 0o777}
        modes |= {elsewhere.stat().st_mode & 0o777}
    finally:
        os.umask(before)
    assert modes == {0o600 if mode == 0o700 else 0o644}


@pytest.mark.slow
def test_a_whole_federation_is_its_owners_alone(tmp_path):
    out = tmp_path / "run"
    words = f"federate quadratic --clients 2 --rounds 2 --json --out {out}".split()
    # A parent that would let everybody read.
    script = "import os, sys; os.umask(0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", script, sys.executable, "-m", "fedbilevel.cli"]
    done = subprocess.run([*command, *words], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert Result.load(out).config["runtime"] == "flower"
    assert {"nodes", "homes", "superlink.log"} <= {one.name for one in out.iterdir()}
    assert modes_below(out) == {("folder", 0o700), ("file", 0o600)}


KEYS = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"private": "xyz", "records": {}}',
    b'{"private": 3, "records": {}}',
    b'{"records": {}}',
    b'{"private": "' + b"01" * 32 + b'", "records": []}',
    b'{"private": "' + b"01" * 32 + b'", "records": {"1": "no"}}',
    b'{"private": "' + b"01" * 32 + b'", "records": {"1": [7, 7, 7]}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("content", KEYS, ids=lambda one: repr(one[:40]))
def test_damaged_keys_are_put_aside_and_told(tmp_path, content):
    path = tmp_path / "f.keys.json"
    path.write_bytes(content)
    with pytest.warns(DamagedFileWarning, match="f.keys.json is damaged.*put aside"):
        secrets = SiteSecrets("f", 0, tmp_path, Cohorts(2))
    assert len(secrets.keys.public_bytes) == 32 and secrets.site.records == {}
    assert not path.exists()
    assert path.with_suffix(".damaged").read_bytes() == content


def damaged_member(path: Path, flag: int, value: int) -> None:
    """Change a byte of the first entry in an archive's directory."""
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + flag] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("place", "value", "raised"),
    [(8, 1, "encrypted"), (10, 99, "not supported"), (6, 99, "version 9.9")],
    ids=["password", "compression", "version"],
)
def test_an_archive_with_a_strange_member_is_put_aside(tmp_path, place, value, raised):
    start = {"x": np.zeros(3)}
    kept = SiteCheckpoints(start, tmp_path, "f", 0)  # pyright: ignore[reportArgumentType]
    kept.put(1, start, 0)  # pyright: ignore[reportArgumentType]
    kept.save()
    path = tmp_path / "f.npz"
    damaged_member(path, place, value)
    with pytest.raises(RuntimeError, match=raised), zipfile.ZipFile(path) as file:
        file.read(file.namelist()[0])
    with pytest.warns(DamagedFileWarning, match="f.npz is damaged"):
        kept = SiteCheckpoints(start, tmp_path, "f", 0)  # pyright: ignore[reportArgumentType]
    assert kept.found and not kept.kept and not path.exists()
    assert jax.tree.leaves(kept.at(0))[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("serve quadratic --clients 2 --insecure --address {0} --out", "file"),
        ("serve quadratic --clients 2 --insecure --address {0} --out", "file/run"),
        ("federate quadratic --clients 2 --out", "file/run"),
        (NODE + " --state", "file"),
        (NODE + " --state", "file/state"),
        ("label-counts regularization --out", "file/counts.png"),
    ],
)
def test_a_file_where_a_folder_is_needed_is_told(
    tmp_path, occupied, monkeypatch, words, place
):
    # It would change the precision of all tests after this one.
    monkeypatch.setattr("fedbilevel.runtime.configure", lambda *_, **__: None)
    (tmp_path / "file").write_text("in the way")
    done = invoke(*words.format(occupied).split(), tmp_path / place)
    assert done.exit_code == 2
    told = "a file is where a folder is needed. Choose another place.\n"
    lines = done.stderr.splitlines(keepends=True)
    assert lines[-1].startswith(f"Error: {tmp_path / 'file'}")
    assert lines[-1].endswith(told)


FAULTS = {
    errno.ENOSPC: "the disk is full. Free some space. Files kept before are whole.",
    errno.EROFS: "the disk is read-only. Choose a place that can be written.",
    errno.EIO: "the disk reports an error. Check the disk.",
}


@pytest.mark.parametrize("number", FAULTS)
def test_a_disk_that_fails_is_told_with_the_file(tmp_path, monkeypatch, number):
    path = tmp_path / "kept"
    _files.write_atomically(path, lambda file: file.write(b"old"))

    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        _files.write_atomically(path, lambda file: file.write(b"new"))
    assert sentence_of(caught.value) == f"{path}: {FAULTS[number]}"
    assert apps._described(caught.value) == sentence_of(caught.value)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_other_errors_of_the_system_keep_their_words():
    assert sentence_of(OSError("no number")) == "no number"
    strange = OSError(errno.ELOOP, os.strerror(errno.ELOOP), "here")
    assert sentence_of(strange) == f"here: {os.strerror(errno.ELOOP)}."


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if (
        os.geteuid()
        or subprocess.run(["mount", *options], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_a_sentence(small_disk):
    (small_disk / "other").write_bytes(bytes(60_000))
    command = [sys.executable, "-m", "fedbilevel.cli", "run", "quadratic"]
    command += ["--clients", "2", "--rounds", "1", "--out", str(small_disk / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(FAULTS[errno.ENOSPC])
    assert f"Error: {small_disk / 'run'}" in done.stderr
