"""The sampler of mistakes: what it changes, what it leaves alone, and how it draws."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.random_mistakes import area_of, changes_of, drawn
from benchmarks.tests_of_lines import Ran, chosen

SOURCES = Path(__file__).parent.parent / "src" / "fedbilevel"
TEXT = '''"""A module with 3 words > 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    HIDDEN = 1 + 1
LARGEST = 7

@decorated(limit=4)
def first(value: Literal[5], much: int = 6) -> Literal[8]:
    """Add 1."""
    if value > LARGEST:
        raise ValueError(f"{value + 1} is more than {LARGEST}")
    self.kept = much
    return value * 2 if ready and much else add(value, much, exact=True)
'''


def pieces() -> Counter[tuple[str, str, str]]:
    """Return kind, old and new text of all that can be changed above."""
    found = changes_of("made_up.py", TEXT)
    return Counter((one.kind, TEXT[one.start : one.end], one.new) for one in found)


def test_every_kind_of_mistake_is_found_once() -> None:
    whole = "value * 2 if ready and much else add(value, much, exact=True)"
    other = "(add(value, much, exact=True) if ready and much else value * 2)"
    assert pieces() == Counter(
        [
            ("constant", "7", "(8)"),
            ("constant", "7", "(6)"),
            ("constant", "6", "(7)"),
            ("constant", "6", "(5)"),
            ("comparison", "value > LARGEST", "(value >= LARGEST)"),
            ("comparison", "value > LARGEST", "(value < LARGEST)"),
            (
                "statement",
                'raise ValueError(f"{value + 1} is more than {LARGEST}")',
                "pass",
            ),
            ("statement", "self.kept = much", "pass"),
            ("branch", whole, other),
            ("arithmetic", "value * 2", "(value / 2)"),
            ("arithmetic", "value * 2", "(value + 2)"),
            ("constant", "2", "(3)"),
            ("constant", "2", "(1)"),
            ("boolean", "ready and much", "(ready or much)"),
            ("boolean", "ready and much", "(ready)"),
            ("boolean", "ready and much", "(much)"),
            (
                "argument",
                "add(value, much, exact=True)",
                "(add(much, value, exact=True))",
            ),
            ("argument", "add(value, much, exact=True)", "(add(value, much))"),
            ("constant", "True", "(False)"),
        ]
    )


def test_a_line_is_tried_where_its_consequences_are() -> None:
    lines = {TEXT[one.start : one.end]: one.lines for one in changes_of("m.py", TEXT)}
    assert lines["7"] == {10, 11}  # where the name is read
    assert lines["6"] == frozenset(range(8, 14))  # a default, wherever it is called
    assert lines["self.kept = much"] == {12}


def test_drawn_mistakes_are_evenly_spread_and_fit_their_files() -> None:
    wanted = ["channels", "hypergradient", "privacy"]
    found = drawn(SOURCES, 30, seed=5, areas=wanted)
    assert len(set(found)) == 30
    assert Counter(area_of(one.file) for one in found) == dict.fromkeys(wanted, 10)
    for one in found:
        text = (SOURCES / one.file).read_text()
        old, new = one.piece(text)
        assert text.count(old) == 1
        changed = ast.parse(text.replace(old, new))
        assert ast.dump(changed) != ast.dump(ast.parse(text))


def test_a_seed_draws_the_same_mistakes_again() -> None:
    part = SOURCES / "channels"
    found = drawn(part, 9, seed=5, areas=[])
    assert found == drawn(part, 9, seed=5, areas=["top level"])
    assert found != drawn(part, 9, seed=6, areas=[])
    with pytest.raises(SystemExit, match="no such area"):
        drawn(part, 1, seed=5, areas=["nowhere"])


def test_tests_that_ran_a_line_come_before_others_of_their_files() -> None:
    def ran(test: str, seconds: float, line: int, file: str = "a.py") -> Ran:
        return Ran(test, seconds, False, {file: 1 << line})

    all_of_them = [
        ran("one.py::p[1]", 1.0, 7),
        ran("one.py::p[2]", 1.5, 7),
        ran("one.py::q", 9.0, 7),
        ran("one.py::near", 0.5, 8),
        ran("two.py::far", 0.1, 8),
        ran("three.py::elsewhere", 0.1, 7, "b.py"),
    ]

    def names(seconds: float) -> set[str]:
        found = chosen(all_of_them, "a.py", frozenset({7}), seconds)
        return {one.test.partition("::")[2] for one in found}

    # Four seconds are for the start of a file. One of each function goes first.
    assert names(100) == {"p[1]", "p[2]", "q", "near"}
    assert names(14.2) == {"p[1]", "q"}
    assert names(15.6) == {"p[1]", "p[2]", "q"}
    # Nobody ran that line: whoever ran the file.
    found = chosen(all_of_them, "a.py", frozenset({1}), 100)
    assert {one.test for one in found} == {one.test for one in all_of_them[:-1]}
