"""The folders are the registries; the table of cases and the documents follow them."""

import importlib
import inspect
from pathlib import Path

import pytest

from fedbilevel import algorithms, tasks
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError
from tests.cases import CASES, NAMES

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_every_algorithm_has_a_row():
    assert sorted(NAMES) == algorithms.names()
    for case in CASES:
        assert type(case.algorithm) is algorithms.find(case.name)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_file_says_what_it_is(name):
    kind = algorithms.find(name)
    module = importlib.import_module(kind.__module__)
    assert issubclass(kind, AbstractAlgorithm)
    assert module.__all__ == [kind.__name__]
    text = module.__doc__ or ""
    assert "Deviations:" in text
    assert "<-" in text or "=" in text
    assert "arXiv" in kind.reference
    assert kind.provenance


def test_every_task_can_be_made_and_recommends_sizes():
    for name in tasks.names():
        task = tasks.find(name)()
        assert {"rounds", "local_steps", "batch"} <= set(task.recommended)
        assert inspect.getmodule(tasks.find(name)).__doc__  # pyright: ignore[reportOptionalMemberAccess]


def test_the_readme_names_all_there_is():
    for name in (*algorithms.names(), *tasks.names()):
        assert f"`{name}`" in README


def test_unknown_names_say_the_nearest():
    with pytest.raises(InvalidInputError, match="Did you mean 'local-bsgm'"):
        algorithms.find("local-bsg")
    with pytest.raises(InvalidInputError, match="Did you mean 'quadratic'"):
        tasks.find("quadratics")
