"""Every option of a command that runs something reaches what it is an option of.

What is passed on stands here whole, by hand: an option that goes nowhere, or elsewhere,
or has another default, is a difference.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedbilevel.experiments import Experiment
from tests.wiring import (
    CHOSEN,
    GONE,
    TUNED,
    TUNING,
    Case,
    a_watch,
    checks_of,
    nothing,
    of,
    passed_on,
    same,
    shared,
    told,
    uncovered,
)

EXPERIMENT = Experiment("quadratic")
FOLLOWS = "fedbilevel.experiments.theory.follow_file"
SPIED = {
    "fedbilevel.experiments.Experiment.load": lambda given: EXPERIMENT,
    "fedbilevel.cli.running.require_trust": nothing,
    "fedbilevel.runtime.configure": nothing,
    "fedbilevel.runtime.join": nothing,
    "fedbilevel.tracking.check_tracking": nothing,
    "fedbilevel.tracking.tracker": lambda given: nullcontext("kept"),
    "fedbilevel.cli.running.watched": a_watch,
    "fedbilevel.cli.running.show_result": lambda given: None,
    "fedbilevel.cli.running._show_tuned": nothing,
    "fedbilevel.experiments.Experiment.run": lambda given: "found",
    "fedbilevel.experiments.tuning.tune": lambda given: SimpleNamespace(
        experiment=given["experiment"], summary=lambda: {"best": 3}
    ),
    "fedbilevel.cli.running.print_json": nothing,
    FOLLOWS: same("experiment"),
}
RUN = {
    **told("configure", precision="float32", cores=None),
    **told("watched", title="quadratic", quiet=False, alone=True),
    **of("run"),
    **told("run", folder=None, resume=False, watch="watch", on_round=None),
    **told("run", built="show_data", about="stage", say="say"),
    **told("show_result", result="found", folder=None, as_json=False),
}
SEARCH = {
    **of("tune"),
    **told("tune.tuning", **TUNING),
    **told("tune", folder=None, watch="watch"),
    **told("_show_tuned", found="watch", console="stderr"),
}
QUIET = {"watched.quiet": True, "show_result.as_json": True}
OUT = {"run.folder": Path("out"), "show_result.folder": Path("out")}


def tracked(resume):
    """Return what a file for every round changes."""
    return {
        **told("check_tracking", text="jsonl:rounds", resume=resume),
        **told("tracker", text="jsonl:rounds", resume=resume),
        "tracker.about": {**CHOSEN, "options": {}},
        "run.on_round": "kept",
    }


SUMMARY = {"metric": "loss", "target": 0.25}
MADE = SimpleNamespace(found=SimpleNamespace(results={}))
COMPARED = {
    "fedbilevel.runtime.configure": nothing,
    "fedbilevel.cli.running.watched": a_watch,
    "fedbilevel.experiments.comparison.compare": lambda given: MADE,
    "fedbilevel.cli.running._ranked": lambda given: (["first"], SUMMARY),
    "fedbilevel.cli.running._show_ranked": nothing,
    "fedbilevel.cli.running.print_json": nothing,
    "fedbilevel.experiments.run_folder.write_json": nothing,
    "fedbilevel.report.draw_curves": lambda given: "curves",
    "fedbilevel._files.write_atomically": nothing,
    "fedbilevel.cli.running.write_report": nothing,
}
COMPARE = {
    **told("configure", precision="float32", cores=None),
    **told("watched", title="quadratic", quiet=False, alone=True),
    **of("compare"),
    **told("compare", names=["fedbio", "fednest"], seeds=5, tuning=None),
    **told("compare", equal="trials", folder=None, resume=False),
    **told("compare", about="<lambda>", watch="watch"),
    **told("_ranked", task="quadratic", made="watch", target=None, equal="trials"),
    **told("_show_ranked", made="watch", standings=["first"], summary=SUMMARY),
}
CASES = {
    "run": Case(
        "run quadratic",
        SPIED,
        RUN,
        {
            **shared("run"),
            "task": (
                "run minimax",
                {"experiment.task": "minimax", "watched.title": "minimax"},
            ),
            "out": ("--out out", OUT),
            "track": ("--track jsonl:rounds", tracked(False)),
            "as_json": ("--json", {**QUIET, "run.built": None}),
        },
    ),
    "run --plan": Case(
        "run quadratic --plan plan.json",
        SPIED,
        {**RUN, **of("follow_file"), "follow_file.path": Path("plan.json")},
        {"plan": ("", {})},
    ),
    "run --tune": Case(
        "run quadratic --tune",
        SPIED,
        {**RUN, **SEARCH},
        {
            "tune": ("", {}),
            **shared("run", *TUNED, "rounds", "precision"),
            # What is found is run where it was looked for, so that it can be resumed.
            "out": (
                "--out out",
                {**OUT, "tune.folder": Path("out/tuning"), "run.resume": True},
            ),
        },
    ),
    "tune": Case(
        "tune quadratic",
        SPIED,
        {
            **told("configure", precision="float32", cores=None),
            **told("watched", title="tuning quadratic", quiet=False, alone=True),
            **SEARCH,
            "_show_tuned.console": "stdout",
        },
        {
            **shared("tune"),
            **shared("tune", *TUNED),
            "task": (
                "tune minimax",
                {"experiment.task": "minimax", "watched.title": "tuning minimax"},
            ),
            "out": ("--out out", {"tune.folder": Path("out")}),
            "as_json": (
                "--json",
                {
                    "watched.quiet": True,
                    "print_json.summary": {"best": 3},
                    "_show_tuned.found": GONE,
                    "_show_tuned.console": GONE,
                },
            ),
        },
    ),
    "resume": Case(
        "resume folder",
        SPIED,
        {
            **RUN,
            **told("load", folder=Path("folder")),
            **told("run", folder=Path("folder"), resume=True),
            **of("require_trust"),
            **told("show_result", folder=Path("folder")),
        },
        {
            "folder": (
                "resume other",
                {"folder": Path("other")},
            ),
            "track": ("--track jsonl:rounds", tracked(True)),
            "as_json": ("--json", {**QUIET, "run.built": None}),
            **shared("resume"),
            "trust_code": ("--trust-code", {}),
        },
    ),
    "compare": Case(
        "compare quadratic --algorithms fedbio,fednest",
        COMPARED,
        COMPARE,
        {
            **shared("compare"),
            "task": (
                "compare minimax --algorithms fedbio,fednest",
                {
                    "experiment.task": "minimax",
                    "watched.title": "minimax",
                    "_ranked.task": "minimax",
                },
            ),
            "names": ("--algorithms fedavg", {"names": ["fedavg"]}),
            "seeds": ("--seeds 3", {"compare.seeds": 3}),
            "target": ("--target 0.5", {"_ranked.target": 0.5}),
            "equal": ("--equal bytes", {"equal": "bytes"}),
            "out": (
                "--out out",
                {
                    "compare.folder": Path("out"),
                    "write_json.path": Path("out/comparison.json"),
                    "write_json.content": SUMMARY,
                    **told("draw_curves", results={}, metric="loss", target=0.25),
                    "write_atomically.path": Path("out/curves.png"),
                    **told("write_atomically", content="curves", mode=0o666),
                    "write_report.folder": Path("out"),
                },
            ),
            "as_json": (
                "--json",
                {
                    "watched.quiet": True,
                    "print_json.summary": SUMMARY,
                    **told("_show_ranked", made=GONE, standings=GONE, summary=GONE),
                },
            ),
        },
    ),
    "compare --tune": Case(
        "compare quadratic --algorithms fedbio,fednest --tune",
        COMPARED,
        {
            **{key: one for key, one in COMPARE.items() if key != "compare.tuning"},
            **told("compare.tuning", **TUNING),
        },
        {"tune": ("", {}), **shared("compare", *TUNED)},
    ),
    "compare --resume": Case(
        "compare quadratic --algorithms fedbio,fednest --resume --out out --json",
        COMPARED,
        {
            **{key: one for key, one in COMPARE.items() if "_show" not in key},
            **told("compare", folder=Path("out"), resume=True),
            "watched.quiet": True,
            "write_json.path": Path("out/comparison.json"),
            "write_json.content": SUMMARY,
            **told("draw_curves", results={}, metric="loss", target=0.25),
            "write_atomically.path": Path("out/curves.png"),
            **told("write_atomically", content="curves", mode=0o666),
            "write_report.folder": Path("out"),
            "print_json.summary": SUMMARY,
        },
        {"resume": ("", {})},
    ),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


(
    test_without_options_a_command_passes_on_its_defaults,
    test_an_option_changes_what_it_is_for_and_nothing_else,
) = checks_of(CASES)


@pytest.mark.parametrize("command", ["run", "resume", "tune", "compare"])
def test_every_option_has_a_row(command):
    assert not uncovered(CASES, command)


def test_without_names_what_is_recommended_is_compared(monkeypatch):
    spied = {
        **COMPARED,
        "fedbilevel.experiments.recommendation.recommend": lambda given: [
            SimpleNamespace(name="fedbio"),
            SimpleNamespace(name="fedavg"),
        ],
    }
    case = Case("compare quadratic --participants 2", spied, {}, {})
    found = passed_on(case, "", monkeypatch)
    # Cohorts of that size are what the advice is for.
    assert found["recommend.situation.participants"] == 2
    assert found["recommend.situation.hessian"] is True
    assert found["compare.names"] == ["fedbio", "fedavg"]
