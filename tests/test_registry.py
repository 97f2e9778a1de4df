"""The folders are the registries; the table of cases and the documents follow them."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any, assert_type, get_type_hints

import equinox as eqx
import pytest

import fedbilevel
from fedbilevel import algorithms, tasks
from fedbilevel.algorithms import AbstractAlgorithm, OneLoop, Preset, presets
from fedbilevel.algorithms.base import declared
from fedbilevel.algorithms.wrappers.optimizer import Descent
from fedbilevel.errors import InvalidInputError
from tests.cases import NAMES, ROWS

DOCS = Path(__file__).parent.parent / "docs"
BY_NAME = pytest.mark.parametrize("name", algorithms.names())


def module_of(name: str) -> ModuleType:
    return importlib.import_module(algorithms.find(name).kind.__module__)


def test_every_algorithm_has_a_row():
    assert sorted(NAMES) == algorithms.names()


@BY_NAME
def test_an_algorithm_file_says_what_it_is(name):
    entry = algorithms.find(name)
    if isinstance(entry.make, Preset):
        assert entry.make.name == name
    else:
        assert module_of(name).__all__ == [entry.kind.__name__]
    assert "Deviations:" in entry.about
    assert "<-" in entry.about or "=" in entry.about
    assert "arXiv" in entry.reference or "doi" in entry.reference
    assert entry.provenance and entry.summary and entry.answers


@BY_NAME
def test_an_algorithm_is_a_final_class_or_a_preset_of_one(name):
    entry = algorithms.find(name)
    # What methods share is in modules of which none is a method.
    shared = [
        one for one in entry.kind.__bases__ if one not in (AbstractAlgorithm, OneLoop)
    ]
    assert all(one.__module__.split(".")[-1].startswith("_") for one in shared)
    ours = [kind.__module__.split(".")[0] for kind in entry.kind.__subclasses__()]
    assert "fedbilevel" not in ours
    assert isinstance(entry.make, Preset) or entry.make is entry.kind
    if entry.make is entry.kind:
        assert module_of(name).__all__ == [entry.kind.__name__]


@BY_NAME
def test_every_field_has_a_meaning(name):
    for field in declared(algorithms.find(name).kind).values():
        assert field.metadata.get("meaning"), field.name


@ROWS
def test_an_entry_builds_its_kind_by_its_own_letters(case):
    entry = algorithms.find(case.method)
    assert entry.pools == case.pools
    settings = case.algorithm.settings()
    given = {
        letter: settings[one.name]
        for letter, one in entry.parameters.items()
        if one.name in settings
    }
    # What is not among the letters is fixed by the preset.
    assert eqx.tree_equal(entry.make(**given), case.algorithm)


def test_a_preset_takes_its_letters_in_order_and_once():
    entry = algorithms.find("fedbioacc-local")
    assert isinstance(entry.make, Preset)
    with pytest.raises(TypeError, match="hypergradient, a, eta, .*at most once"):
        entry.make(None, hypergradient=None)
    with pytest.raises(TypeError, match="at most once"):
        entry.make(*range(len(entry.make.letters.split()) + 1))


@pytest.mark.slow
def test_every_task_can_be_made_and_recommends_sizes():
    for name in tasks.names():
        task = tasks.find(name)()
        assert {"rounds", "local_steps", "batch"} <= set(task.recommended)
        assert task.algorithm in algorithms.names()
        assert set(task.calibration) <= set(algorithms.names())
        assert inspect.getmodule(tasks.find(name)).__doc__  # pyright: ignore[reportOptionalMemberAccess]


def test_the_page_of_tasks_leads_to_each():
    page = (DOCS / "which-task.md").read_text()
    for name in tasks.names():
        assert f"[`run {name}`](tasks/{name}.md)" in page


def test_unknown_names_say_the_nearest():
    with pytest.raises(InvalidInputError, match="Did you mean 'local-bsgm'"):
        algorithms.find("local-bsg")
    with pytest.raises(InvalidInputError, match="Did you mean 'quadratic'"):
        tasks.find("quadratics")


def test_of_many_names_three_are_suggested_and_few_are_listed():
    three = "Did you mean 'fedbio', '[a-z-]*' or '[a-z-]*'[?] There are [0-9]+: `fedb"
    with pytest.raises(InvalidInputError, match=three) as caught:
        algorithms.find("fedbi")
    assert len(str(caught.value)) < 150
    with pytest.raises(InvalidInputError, match="Known: architecture, cleaning, .*two"):
        tasks.find("something else")


def packages() -> list[ModuleType]:
    """Return fedbilevel and all packages in it."""
    within = pkgutil.walk_packages(fedbilevel.__path__, "fedbilevel.", onerror=_fail)
    names = [found.name for found in within if found.ispkg]
    return [fedbilevel, *map(importlib.import_module, names)]


def _fail(name: str) -> None:
    raise ImportError(f"the package {name} cannot be imported")


def test_no_exported_name_hides_a_module():
    """`from package import name` is the module of that name, in whatever order."""
    hidden = []
    for package in packages():
        for module in pkgutil.iter_modules(package.__path__):
            found = getattr(package, module.name, None)
            name = f"{package.__name__}.{module.name}"
            if found is not None and getattr(found, "__name__", "") != name:
                hidden.append(name)
    assert hidden == []


def test_a_preset_is_a_type_to_type_checkers_and_to_python():
    def stepped(method: fedbilevel.FedBiOControls) -> fedbilevel.FedBiOControls | None:
        return method if isinstance(method, fedbilevel.FedBiOControls) else None

    # `make test-all` checks the types of this file.
    made = assert_type(
        fedbilevel.FedBiOControls(1, 1, 1, local_steps=1), fedbilevel.FedBiOControls
    )
    assert stepped(made) is made
    hints = get_type_hints(stepped)
    assert hints["method"] is presets.FedBiOControls
    assert hints["return"] == hints["method"] | None == None | hints["method"]  # noqa: E711
    ours: Any = presets
    others = (int | str) | ours.FedBiODifferences | None
    for kinds in (hints["return"], others | ours.FedBiOControls | bytes):
        assert isinstance(made, kinds) and isinstance(None, kinds)
    assert not isinstance(made, others) and isinstance("text", others)
    assert not isinstance(1.0, None | ours.FedBiOControls)
    stub = Path(str(presets.__file__)).with_suffix(".pyi").read_text()
    names = [n for n, one in vars(presets).items() if isinstance(one, Preset)]
    assert re.findall(r"^class ([A-Z]\w+)\(_Made, init=False\)", stub, re.M) == names


def test_what_a_preset_makes_has_its_name_and_shows_its_values():
    ours: Any = fedbilevel
    made = ours.FedBiOControls(0.1, 0.2, 0.15, local_steps=3)
    assert made.title == "FedBiOControls"
    assert isinstance(made, ours.FedBiOControls)
    assert not isinstance(made, ours.FedBiODifferences)
    assert not isinstance(ours.FedBiO(local_steps=3), ours.FedBiOControls)
    shown = "lr_x=0.1, lr_y=0.2, lr_z=0.15, local_steps=3, drift='controls'"
    assert repr(made) == f"FedBiOControls({shown})"
    assert "named" not in made.parameters()
    values = {"alpha": 0.1, "beta": 0.1, "ell": 3.0, "local_steps": 1, "terms": 1}
    plain = ours.FedNestSGD(**values)  # a preset without a wrapper
    assert plain.title == "FedNestSGD" and isinstance(plain, ours.FedNestSGD)
    around = algorithms.ServerOptimizer(made, Descent(1.0, 0.9))
    assert around.title == "FedBiOControls"
    assert f"FedBiOControls({shown})" in repr(around)
    assert "f32[]" not in repr(around)
