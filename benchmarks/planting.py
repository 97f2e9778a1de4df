"""Copies of the tree in which mistakes are planted, and tests run on them."""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path("src", "fedbilevel")
LIMIT = 600.0  # seconds of one choice of tests; a mistake may also hang
# What every test process imports: it is paid for once.
PRELOADED = ["equinox", "hypothesis", "jax", "numpy", "optax", "pytest"]


@dataclass(frozen=True)
class Mutant:
    """A planted mistake; `equivalent` explains why no test can notice it."""

    file: str
    old: str
    new: str
    tests: str = ""
    equivalent: str = ""

    @property
    def layer(self) -> str:
        """The part of the package it is in."""
        return self.file.partition("/")[0]

    def planted(self, text: str) -> str:
        """Return the text of its file with the mistake, or raise."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.file}: found {found} times: {self.old!r}")
        return text.replace(self.old, self.new)

    def told(self) -> str:
        """Return it in one line."""
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        return f"{self.file}: {old}  ->  {new}"


def preload() -> None:
    """Let all test processes come from one that has imported the libraries."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def copied_tree(folder: Path) -> Path:
    """Copy what the tests need; compiled programs are shared with the original."""
    for part in ("src", "tests", "docs", "examples", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder / path.name)
    (ROOT / ".pytest_cache").mkdir(exist_ok=True)
    (folder / ".pytest_cache").symlink_to(ROOT / ".pytest_cache")
    return folder


@contextmanager
def mistake_in(tree: Path, mutant: Mutant | None) -> Iterator[None]:
    """Plant a mistake in a copy, and take it out again."""
    if mutant is None:
        yield
        return
    path = tree / SOURCES / mutant.file
    whole = path.read_text()
    path.write_text(mutant.planted(whole))
    try:
        yield
    finally:
        path.write_text(whole)


def _run_pytest(tree: str, arguments: list[str], log: str) -> None:
    """Run tests in a process of its own, with the sources of the copy in front."""
    os.setsid()  # what it starts ends with it
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    source = str(Path(tree, "src"))
    sys.path[:0] = [source, tree]
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([source, *([rest] if rest else [])])
    import pytest

    os._exit(int(pytest.main(arguments)))


def run_tests(
    tree: Path, arguments: list[str], mutant: Mutant | None, limit: float
) -> tuple[str, str]:
    """Return passed, failed, hung, or broken for a choice of tests, and its output."""
    quiet = ["-x", "-q", "-p", "no:cacheprovider"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of the preloaded
    log = tree / "log.txt"
    context = multiprocessing.get_context("forkserver")
    given = (str(tree), [*quiet, *arguments], str(log))
    with mistake_in(tree, mutant):
        process = context.Process(target=_run_pytest, args=given)
        process.start()
        process.join(limit)
        if hung := process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    codes = {0: "passed", 1: "failed", 2: "failed"}  # 2: it cannot even be imported
    result = codes.get(process.exitcode or 0, f"broken ({process.exitcode})")
    return "hung" if hung else result, log.read_text(errors="replace")


class Workshop:
    """Copies of the tree, one for each worker."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.trees: Queue[Path] = Queue()
        for number in range(jobs):
            self.trees.put(copied_tree(folder / str(number)))

    def run(
        self, arguments: list[str], mutant: Mutant | None = None, limit: float = LIMIT
    ) -> tuple[str, str]:
        """Run a choice of tests in a copy that is free."""
        tree = self.trees.get()
        try:
            return run_tests(tree, arguments, mutant, limit)
        finally:
            self.trees.put(tree)
