"""What the texts claim of the algorithms is what each says of itself."""

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbilevel import algorithms
from fedbilevel.cli.app import app

ROOT = Path(__file__).parent.parent
METHODS_PAGE = (ROOT / "docs" / "methods.md").read_text()
ENTRIES = {name: algorithms.find(name) for name in algorithms.names()}
READ = "listing read in the paper"
TEXTS = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml")),
    ROOT / "benchmarks" / "README.md",
]
METHODS = r"(algorithms?|methods?|listings?)"
NEAR = r"(,?\s+\w+){0,2},?\s+"
ALL = rf"\b(every|all|each){NEAR}{METHODS}\b|\b{METHODS}{NEAR}(every|all|each)\b"
SOURCE = r"\b(papers?|literature|authors?|published|verified|line by line)\b"


def overclaims(text: str) -> list[str]:
    """Return the sentences that say of all algorithms what their papers would show."""
    prose = re.sub(r"^ {4}.*$", "", text, flags=re.M)  # no programs, no formulas
    sentences = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\|", prose)
    return [
        one
        for one in sentences
        if all(re.search(word, one, re.I) for word in (ALL, SOURCE))
    ]


def docstrings(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_text()))
    told = [
        ast.get_docstring(node)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    return "\n\n".join(text for text in told if text)


@pytest.mark.parametrize(
    "sentence",
    [
        "Every algorithm is checked line by line\nagainst the literature.",
        "All listings were compared with their papers.",
        "The methods, each verified, are these.",
    ],
)
def test_a_claim_for_all_is_seen(sentence):
    assert overclaims(f"Before. {sentence} After.") == [sentence]


def test_no_text_claims_that_all_algorithms_were_checked_against_papers():
    # If this ever fails, the claim may be made.
    assert any(one.provenance != READ for one in ENTRIES.values())
    found = {str(path): overclaims(path.read_text()) for path in TEXTS}
    for path in (ROOT / "src").rglob("*.py"):
        found[str(path)] = overclaims(docstrings(path))
    assert {name: claims for name, claims in found.items() if claims} == {}


def test_the_list_says_of_every_algorithm_how_it_is_known():
    done = CliRunner().invoke(app, ["list", "algorithms"], env={"COLUMNS": "400"})
    for name, entry in ENTRIES.items():
        (row,) = re.findall(rf"^│ {name} .*$", done.stdout, flags=re.M)
        assert row.split("│")[-2].strip() == entry.provenance


def test_the_page_counts_what_the_algorithms_say_of_themselves():
    words = " ".join(METHODS_PAGE.split())
    (found,) = re.findall(
        r"Of these (\d+) methods, (\d+) were read as a listing in their paper, (\d+) "
        r"are reconstructed from an abstract and unverified, and (\d+) are known in "
        r"part, or from memory\.",
        words,
    )
    told = [entry.provenance for entry in ENTRIES.values()]
    guessed = [one for one in told if "listing reconstructed, unverified" in one]
    counts = [len(told), told.count(READ), len(guessed)]
    assert [int(one) for one in found] == [*counts, 2 * counts[0] - sum(counts)]
    # The first lines say "some": one at least of each.
    assert "some were read in the paper, some are reconstructed" in words
    assert min(counts) > 0


def test_every_algorithm_is_compared_with_a_second_program_of_its_listing():
    """The page of methods says so, but for presets on the rows of all clients."""
    files = (ROOT / "tests").glob("test_transcription*.py")
    text = "".join(path.read_text() for path in files)
    tests = re.findall(r"def test_(\w+)_is_(?:its_listing|algorithm_\d)\(", text)
    compared = {name.partition("_with_")[0].replace("_", "-") for name in tests}
    # One test has a row for each method that corrects drift, presets by their parts.
    compared.remove("a-corrected-method")
    corrected = re.findall(r'^    "([\w-]+)":', text, flags=re.M)
    compared |= {name for name in ENTRIES if name in corrected}
    # A preset on the rows of all clients is compared as the method that it is there.
    of_others = {n for n, e in ENTRIES.items() if e.pools and e.make is not e.kind}
    assert compared | of_others == set(ENTRIES)
    kinds = {ENTRIES[name].kind for name in compared}
    assert all(ENTRIES[name].kind in kinds for name in of_others)
    assert any(one.make is ENTRIES["pooled"].kind for one in ENTRIES.values())
    words = " ".join(METHODS_PAGE.split())
    assert "Presets are checked against the method they specialize." in words
