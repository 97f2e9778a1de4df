"""Plants random mistakes, and says which tests notice, or that none of them does.

A mistake is tried on tests that ran its lines. Where no test ran the file in its own
process, those that mutants.toml lists for it and all that name what it defines are
tried. What fails is run again without the mistake: a test that fails then, too, is left
out, and the mistake is tried again.
"""

import argparse
import json
import re
import secrets
import tempfile
import threading
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from planting import ROOT, SOURCES, Mutant, Workshop
from random_mistakes import Change, area_of, drawn
from tests_of_lines import Ran, chosen, read_lines

EXPLAINED = Path(__file__).with_name("equivalent_mistakes.toml")
RECORDED = ROOT / ".pytest_cache" / "lines"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_TRIES = 6  # tests that fail without a mistake, too, before it is given up
NOTICED = ("killed", "hung")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of random mistakes."""
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--areas", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--lines", type=Path, default=RECORDED)
    parser.add_argument("--results", type=Path, help="a line of JSON for each of them")


@dataclass(frozen=True)
class Trial:
    """A mistake and the tests to try on it: batches of arguments of pytest."""

    change: Change
    mutant: Mutant
    batches: list[list[str]]
    limit: float
    timed: bool  # whether more seconds than the limit must come from the mistake

    def told(self) -> dict[str, object]:
        """Return what it is, for a line of JSON."""
        one = self.change
        place = {"area": area_of(one.file), "kind": one.kind, "line": one.line}
        return {
            **place,
            "file": one.file,
            "old": self.mutant.old,
            "new": self.mutant.new,
        }


def trial_of(
    change: Change, ran: list[Ran], listed: list[Mutant], seconds: float
) -> Trial:
    """Choose the tests for a mistake."""
    text = (ROOT / SOURCES / change.file).read_text()
    mutant = Mutant(change.file, *change.piece(text))
    if tests := chosen(ran, change.file, change.lines, seconds):
        limit = 60 + 4 * sum(one.seconds for one in tests)
        names = [one.test for one in tests]
        return Trial(change, mutant, [["-m", "slow or not slow", *names]], limit, True)
    files = named_tests(change.file, text, listed)
    fast, slow = "not slow and not exhaustive", "slow and not exhaustive"
    batches = [["-m", fast, *files], ["-m", slow, *files]] if files else []
    return Trial(change, mutant, batches, 60 + 4 * seconds, False)


def named_tests(file: str, text: str, listed: list[Mutant]) -> list[str]:
    """Return files of tests: those listed, and those that name what it defines."""
    words = " ".join(one.tests for one in listed if one.file == file).split()
    found = dict.fromkeys(f"tests/{word}" for word in words if word.endswith(".py"))
    public = re.findall(r"^(?:def|class) ([^\W_]\w*)", text, re.MULTILINE)
    module = file.removesuffix(".py").replace("/", ".")
    wanted = re.compile(rf"\b({'|'.join([*public, re.escape(module)])})\b")
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if wanted.search(path.read_text()):
            found[f"tests/{path.name}"] = None
    return [name for name in found if (ROOT / name).exists()]


@dataclass
class Judge:
    """Tries mistakes, and remembers which tests fail without one."""

    shop: Workshop
    broken: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)

    def verdict(self, trial: Trial) -> tuple[str, str]:
        """Return killed, hung, cut, survived or untested, and the test that failed."""
        verdict = "untested"
        for batch in trial.batches:
            verdict, test = self._of_batch(trial, batch)
            if verdict in (*NOTICED, "cut"):
                return verdict, test
        return verdict, ""

    def _of_batch(self, trial: Trial, batch: list[str]) -> tuple[str, str]:
        for _ in range(_TRIES):
            broken = sorted(self.broken)
            rest = [word for word in batch if word.partition("::")[0] not in broken]
            if not any(word.startswith("tests/") for word in rest):
                return "untested", ""
            rest += [f"--deselect={one}" for one in broken]
            result, log = self.shop.run(rest, trial.mutant, trial.limit)
            if result == "hung":
                return ("hung" if trial.timed else "cut"), ""
            if result in ("passed", "broken (5)"):  # 5: there are no tests
                return ("survived" if result == "passed" else "untested"), ""
            failed = _FAILED.search(log)
            if failed is None:  # it cannot be imported, or the process died
                return "killed", result
            if self._is_sound(failed[1]):
                return "killed", failed[1]
        return "untested", "too many tests fail without a mistake"

    def _is_sound(self, test: str) -> bool:
        """Return whether a test passes without a mistake."""
        if test not in self.sound | self.broken:
            only = [] if "::" in test else ["--collect-only"]
            given = ["-m", "slow or not slow", *only, test]
            passed = self.shop.run(given)[0] == "passed"
            (self.sound if passed else self.broken).add(test)
        return test in self.sound


def judged(
    trials: list[Trial], jobs: int, slow: set[str], results: Path | None
) -> list[dict[str, object]]:
    """Return what became of each, and write it as it comes."""
    found, lock = [], threading.Lock()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        judge = Judge(Workshop(Path(folder), jobs))

        def of(trial: Trial) -> None:
            began = time.monotonic()
            verdict, test = judge.verdict(trial)
            seconds = round(time.monotonic() - began, 1)
            suite = "make test-all" if test in slow else "make test"
            one = {**trial.told(), "verdict": verdict, "by": test, "seconds": seconds}
            with lock:
                found.append(one | ({"suite": suite} if test else {}))
                print(
                    f"{verdict:9} {seconds:5.0f} s  {trial.mutant.told()}", flush=True
                )
                if results is not None:
                    with results.open("a") as file:
                        file.write(json.dumps(found[-1]) + "\n")

        # The longest first, or one core works alone in the end.
        ordered = sorted(trials, key=lambda one: -one.limit)
        for done in as_completed([pool.submit(of, trial) for trial in ordered]):
            done.result()
    return found


def reasons() -> dict[tuple[str, str, str], str]:
    """Return why some mistakes cannot be noticed."""
    listed = tomllib.loads(EXPLAINED.read_text()).get("mistake", [])
    return {(one["file"], one["old"], one["new"]): one["reason"] for one in listed}


def report(given: argparse.Namespace, listed: list[Mutant]) -> int:
    """Draw mistakes, try them, print what was found; return the exit status."""
    ran = read_lines(given.lines)
    changes = drawn(ROOT / SOURCES, given.random, given.seed, given.areas)
    print(f"{len(changes)} mistakes of seed {given.seed}, {len(ran)} recorded tests")
    trials = [trial_of(one, ran, listed, given.seconds) for one in changes]
    if given.check:
        return 0
    slow = {one.test for one in ran if one.slow}
    found = judged(trials, given.jobs, slow, given.results)
    known = reasons()
    for one in found:
        place = (str(one["file"]), str(one["old"]), str(one["new"]))
        one["reason"] = known.get(place, "")
    print(table(found))
    return int(any(_counts(one) and one["verdict"] not in NOTICED for one in found))


def _counts(one: dict[str, object]) -> bool:
    """Return whether a mistake should have been noticed."""
    return one["verdict"] in NOTICED or not one["reason"]


def table(found: list[dict[str, object]]) -> str:
    """Return a line for each area, and all that nobody noticed."""
    planted = Counter(str(one["area"]) for one in found if _counts(one))
    noticed = Counter(str(one["area"]) for one in found if one["verdict"] in NOTICED)
    lines = [f"{'area':14} planted noticed"]
    for area in sorted(planted):
        lines.append(f"{area:14} {planted[area]:7d} {noticed[area]:7d}")
    lines.append(f"{'all':14} {planted.total():7d} {noticed.total():7d}")
    for one in found:
        if one["verdict"] not in NOTICED:
            lines += [
                "",
                f"{one['verdict']}: {one['file']}:{one['line']} {one['kind']}",
            ]
            lines += [str(one["old"]), f"  ->\n{one['new']}"]
            lines.append(f"  {one['reason'] or 'not explained'}")
    return "\n".join(lines)
