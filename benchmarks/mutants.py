"""Plants mistakes, one at a time, and tells which of them the tests notice.

    python benchmarks/mutants.py [--jobs N] [--only TEXT] [--check]
    python benchmarks/mutants.py --random 120 [--seed S] [--areas channels privacy ...]

`mutants.toml` lists them: a file below src/fedbilevel, a piece of it that is there
exactly once, what stands in its place, and the tests that should fail then. Every
choice of tests must first pass without a mistake. `--only` takes those whose file or
change contains a text, `--check` only looks whether all pieces are still there.

`--random` draws mistakes instead (`random_mistakes.py`), and tries each on the tests
that run its lines, which were recorded in `--lines` (`tests_of_lines.py`), for about
`--seconds`. `equivalent_mistakes.toml` explains those that no test can notice.

The exit status is 1 if an unexplained mistake survives.
"""

import argparse
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import random_verdicts
from planting import ROOT, SOURCES, Mutant, Workshop, preload

LIST = Path(__file__).with_name("mutants.toml")
EVERY = ["-m", "slow or not slow"]


def read_list() -> list[Mutant]:
    """Return all mutants; raise where one no longer fits its file."""
    found = [Mutant(**one) for one in tomllib.loads(LIST.read_text())["mutant"]]
    for one in found:
        one.planted((ROOT / SOURCES / one.file).read_text())
    return found


def words_of(tests: str) -> list[str]:
    """Return the arguments of pytest; what follows -k is one of them."""
    before, found, after = tests.partition(" -k ")
    names = [f"tests/{word}" if ".py" in word else word for word in before.split()]
    return [*EVERY, *names, *(["-k", after] if found else [])]


def judged(mutants: list[Mutant], jobs: int) -> dict[Mutant, str]:
    """Return killed, survived or equivalent for each of them."""
    with tempfile.TemporaryDirectory() as folder:
        shop, found = Workshop(Path(folder), jobs), {}
        with ThreadPoolExecutor(jobs) as pool:
            choices = list(dict.fromkeys(one.tests for one in mutants))
            clean = pool.map(lambda tests: shop.run(words_of(tests))[0], choices)
            for tests, result in zip(choices, clean, strict=True):
                if result != "passed":
                    raise SystemExit(f"without a mistake '{tests}' is {result}")

            def of(mutant: Mutant) -> str:
                began = time.monotonic()
                result, _ = shop.run(words_of(mutant.tests), mutant)
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
    random_verdicts.add_options(parser)
    given = parser.parse_args()
    mutants = [one for one in read_list() if given.only in one.told()]
    preload()
    if given.random:
        sys.exit(random_verdicts.report(given, mutants))
    print(f"{len(mutants)} mistakes, {dict(Counter(one.layer for one in mutants))}")
    if given.check:
        return
    found = judged(mutants, given.jobs)
    print(table(found))
    survivors = [one for one, verdict in found.items() if verdict == "survived"]
    sys.exit(any(not one.equivalent for one in survivors))


if __name__ == "__main__":
    main()
