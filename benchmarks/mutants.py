"""Plants mistakes, one at a time, and tells which of them the tests notice.

    python benchmarks/mutants.py [--jobs N] [--only TEXT] [--check]

`mutants.toml` lists them: a file below src/fedbilevel, a piece of it that is there
exactly once, what stands in its place, and the tests that should fail then. Every
choice of tests must first pass without a mistake. `--only` takes those whose file or
change contains a text, `--check` only looks whether all pieces are still there. The
exit status is 1 if an unexplained mistake survives.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutants.toml")
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
    tests: str
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


def read_list() -> list[Mutant]:
    """Return all mutants; raise where one no longer fits its file."""
    found = [Mutant(**one) for one in tomllib.loads(LIST.read_text())["mutant"]]
    for one in found:
        one.planted((ROOT / SOURCES / one.file).read_text())
    return found


def copied_tree(folder: Path) -> Path:
    """Copy what the tests need; compiled programs are shared with the original."""
    for part in ("src", "tests", "docs", "examples", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
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
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    source = str(Path(tree, "src"))
    sys.path[:0] = [source, tree]
    os.environ["PYTHONPATH"] = source
    import pytest

    os._exit(int(pytest.main(arguments)))


def outcome(tree: Path, tests: str, mutant: Mutant | None) -> str:
    """Return passed, failed, hung, or broken for a choice of tests."""
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of the preloaded
    names = [f"tests/{word}" if ".py" in word else word for word in _words(tests)]
    log = tree / "log.txt"
    context = multiprocessing.get_context("forkserver")
    arguments = (str(tree), [*quiet, *names], str(log))
    with mistake_in(tree, mutant):
        process = context.Process(target=_run_pytest, args=arguments)
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
            return "hung"
    codes = {0: "passed", 1: "failed", 2: "failed"}  # 2: it cannot even be imported
    return codes.get(process.exitcode or 0, f"broken ({process.exitcode})")


def _words(tests: str) -> list[str]:
    """Return the arguments of pytest; what follows -k is one of them."""
    before, found, after = tests.partition(" -k ")
    return [*before.split(), *(["-k", after] if found else [])]


class Workshop:
    """Copies of the tree, one for each worker."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.trees: Queue[Path] = Queue()
        for number in range(jobs):
            self.trees.put(copied_tree(folder / str(number)))

    def outcome(self, tests: str, mutant: Mutant | None = None) -> str:
        """Run a choice of tests in a copy that is free."""
        tree = self.trees.get()
        try:
            return outcome(tree, tests, mutant)
        finally:
            self.trees.put(tree)


def judged(mutants: list[Mutant], jobs: int) -> dict[Mutant, str]:
    """Return killed, survived or equivalent for each of them."""
    with tempfile.TemporaryDirectory() as folder:
        shop, found = Workshop(Path(folder), jobs), {}
        with ThreadPoolExecutor(jobs) as pool:
            choices = list(dict.fromkeys(one.tests for one in mutants))
            for tests, result in zip(
                choices, pool.map(shop.outcome, choices), strict=True
            ):
                if result != "passed":
                    raise SystemExit(f"without a mistake '{tests}' is {result}")

            def of(mutant: Mutant) -> str:
                began = time.monotonic()
                result = shop.outcome(mutant.tests, mutant)
                verdict = "survived" if result == "passed" else "killed"
                seconds = time.monotonic() - began
                print(f"{verdict:9} {seconds:5.0f} s  {mutant.told()}", flush=True)
                return verdict

            for mutant, verdict in zip(mutants, pool.map(of, mutants), strict=True):
                found[mutant] = verdict
    return found


def table(found: dict[Mutant, str]) -> str:
    """Return a line for each part of the package, and the survivors."""
    planted = Counter(mutant.layer for mutant in found)
    killed = Counter(m.layer for m, verdict in found.items() if verdict == "killed")
    lines = [f"{'part':14} planted  killed"]
    for layer in sorted(planted):
        lines.append(f"{layer:14} {planted[layer]:7d} {killed[layer]:7d}")
    lines.append(f"{'all':14} {len(found):7d} {killed.total():7d}")
    for mutant, verdict in found.items():
        if verdict == "survived":
            lines += ["", f"survived: {mutant.told()}", f"  tests: {mutant.tests}"]
            lines.append(f"  {mutant.equivalent or 'not explained'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant mistakes; do tests notice?")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    mutants = [one for one in read_list() if given.only in one.told()]
    print(f"{len(mutants)} mistakes, {dict(Counter(one.layer for one in mutants))}")
    if given.check:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    found = judged(mutants, given.jobs)
    print(table(found))
    survivors = [one for one, verdict in found.items() if verdict == "survived"]
    sys.exit(any(not one.equivalent for one in survivors))


if __name__ == "__main__":
    main()
