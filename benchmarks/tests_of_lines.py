"""Which tests run a line of the package, and which of them to try on a mistake there.

    python -m pytest -p tests_of_lines ...     # with LINES_OF_TESTS=FOLDER

As a plugin of pytest it writes for every test that passes its seconds, whether it is
slow, and the lines of the package that it ran, in the folder that LINES_OF_TESTS names.
From Python 3.12 on a line costs something the first time alone (`sys.monitoring`).
Processes that a test starts are not seen; nor is what an earlier test left computed, so
that the other tests of a file are tried after those that ran a line.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

PACKAGE = f"{os.sep}src{os.sep}fedbilevel{os.sep}"
START = 4.0  # seconds to import and collect what one file of tests needs


@dataclass(frozen=True)
class Ran:
    """A test that passed: its seconds, and a bit for every line of each file."""

    test: str
    seconds: float
    slow: bool
    lines: dict[str, int]

    @property
    def file(self) -> str:
        """The file it is in."""
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """Its name without its parameters."""
        return self.test.partition("[")[0]


def read_lines(folder: Path) -> list[Ran]:
    """Return all tests that were recorded."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            lines = {file: int(bits, 16) for file, bits in one.pop("lines").items()}
            found.append(Ran(lines=lines, **one))
    return found


def chosen(
    ran: list[Ran], file: str, lines: frozenset[int], seconds: float
) -> list[Ran]:
    """Return the tests to try on a mistake, as many as so many seconds allow.

    First those that ran one of its lines, of every test function the cheapest, then the
    others of their files. A line that only imports run is tried by tests of its file.
    """
    bits = sum(1 << line for line in lines)
    direct = [one for one in ran if one.lines.get(file, 0) & bits]
    direct = direct or [one for one in ran if file in one.lines]
    files = {one.file for one in direct}
    known = {one.test for one in direct}
    others = [one for one in ran if one.file in files and one.test not in known]
    taken: list[Ran] = []
    begun: set[str] = set()
    for one in (*_varied(direct), *_varied(others)):
        cost = one.seconds + START * (one.file not in begun)
        if cost <= seconds:
            taken.append(one)
            begun.add(one.file)
            seconds -= cost
    # Programs are forgotten between files: a file at a time, the cheapest first.
    cost_of: dict[str, float] = defaultdict(float)
    for one in taken:
        cost_of[one.file] += one.seconds
    return sorted(taken, key=lambda one: (cost_of[one.file], one.file, one.seconds))


def _varied(tests: Iterable[Ran]) -> list[Ran]:
    """Return the cheapest of every test function, then the second ones, and so on."""
    turn: dict[str, int] = defaultdict(int)
    order = []
    for one in sorted(tests, key=lambda one: one.seconds):
        order.append((turn[one.function], one.seconds, one.test, one))
        turn[one.function] += 1
    return [one for *_, one in sorted(order)]


class Lines:
    """The lines of the package that run; `tool` is a number for `sys.monitoring`."""

    def __init__(self, tool: int) -> None:
        self.tool = tool
        self.seen: dict[str, int] = defaultdict(int)

    def add(self, code: CodeType, line: int) -> None:
        """Note a line."""
        name = code.co_filename.partition(PACKAGE)[2]
        self.seen[Path(name).as_posix()] |= 1 << line

    @contextmanager
    def watched(self) -> Iterator[dict[str, int]]:
        """Note the lines that run meanwhile."""
        self.seen = defaultdict(int)
        if sys.version_info >= (3, 12):
            with self._monitored():
                yield self.seen
        else:
            before = sys.gettrace()
            sys.settrace(self._traced)
            try:
                yield self.seen
            finally:
                sys.settrace(before)

    def _traced(self, frame: FrameType, event: str, _: object) -> Callable | None:
        if PACKAGE not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.add(frame.f_code, frame.f_lineno)
        return self._traced

    @contextmanager
    def _monitored(self) -> Iterator[None]:
        tool: Any = sys.monitoring  # pyright: ignore
        number, event = self.tool, tool.events.LINE

        def ran(code: CodeType, line: int) -> object:
            if PACKAGE in code.co_filename:
                self.add(code, line)
            return tool.DISABLE

        tool.use_tool_id(number, "tests_of_lines")
        tool.register_callback(number, event, ran)
        tool.set_events(number, event)
        tool.restart_events()
        try:
            yield
        finally:
            tool.set_events(number, 0)
            tool.free_tool_id(number)


_lines = Lines(tool=1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record a test that passes."""
    began = time.monotonic()
    with _lines.watched() as seen:
        result = yield
    if item.stash.get(_passed, False):
        one = {
            "test": item.nodeid,
            "seconds": round(time.monotonic() - began, 3),
            "slow": item.get_closest_marker("slow") is not None,
            "lines": {file: format(bits, "x") for file, bits in seen.items()},
        }
        with Path(os.environ["LINES_OF_TESTS"], f"{os.getpid()}.jsonl").open("a") as to:
            to.write(json.dumps(one) + "\n")
    return result


_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether a test passed; one that is skipped did not."""
    report = yield
    if call.when == "call":
        item.stash[_passed] = report.passed
    elif report.failed:
        item.stash[_passed] = False
    return report
