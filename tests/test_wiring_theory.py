"""Every option of the commands on theorems reaches what measures or plans.

As in `test_wiring`, what is passed on stands here whole, by hand.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedbilevel.algorithms import LocalBSGM, LocalBSGVRM
from tests.wiring import (
    GONE,
    SETTINGS,
    Case,
    checks_of,
    nothing,
    shared,
    told,
    uncovered,
)

CONFIGURED = told("configure", precision="float32", cores=None)


def of(owner, **changes):
    """Return the settings that a function of theory gets, which names an algorithm."""
    usual = {**SETTINGS, "algorithm": "local-bsgvrm", **changes}
    return told(f"{owner}.experiment", **usual)


@dataclass
class Planned:
    theorem: int = 2
    terms: tuple = ()
    notes: tuple = ("noted",)

    def plain(self):
        return {"clients": 8}


def a_table(given):
    del given
    return "table"


GROUND = SimpleNamespace(plain=lambda: {"estimates": {"mu": 1}}, estimates={})
JSON = "fedbilevel.cli.theory.print_json"
THEORY = {
    "fedbilevel.runtime.configure": nothing,
    "fedbilevel.cli.theory.status": lambda given: nullcontext("now"),
    JSON: nothing,
    "fedbilevel.experiments.run_folder.write_json": nothing,
    "fedbilevel._files.write_atomically": nothing,
}
CHECKS = {
    **THEORY,
    "fedbilevel.experiments.theory.check_theory": lambda given: (
        GROUND,
        {"largest": {"eta": 0.5}},
    ),
    "fedbilevel.report.estimates_table": a_table,
    "fedbilevel.report.conditions_table": a_table,
}
PLANS = {
    **THEORY,
    "fedbilevel.experiments.theory.planned": lambda given: Planned(),
    "fedbilevel.report.plan_table": a_table,
}
REMEMBERS = {
    **THEORY,
    "fedbilevel.experiments.memory.planned_memory": lambda given: {"total": 3},
    "fedbilevel.cli.theory.memory_lines": lambda given: ["line"],
}
BASE = SimpleNamespace(iterations=120)
SCALED = {"points": []}
SCALES = {
    **THEORY,
    "fedbilevel.experiments.theory.calibrate": lambda given: BASE,
    "fedbilevel.experiments.theory.setting_of": lambda given: "made",
    "fedbilevel.studies.scaling.measure_speedup": lambda given: SCALED,
    "fedbilevel.studies.scaling.measure_complexity": lambda given: SCALED,
    "fedbilevel.studies.scaling.default_targets": lambda given: [0.25],
    "fedbilevel.report.scaling_table": a_table,
    "fedbilevel.report.draw_scaling": lambda given: "figure",
}
TOLD = {**SCALED, "task": "quadratic", "algorithm": "local-bsgvrm"}
PLAN = {
    **CONFIGURED,
    "status.text": "measuring",
    **of("planned"),
    **told("planned", clients=8, preset="practical", theorem=None, iterations=None),
    **told("planned", target=0.5, given={}, seeds=16),
    "plan_table.plan": {"algorithm": "local-bsgvrm", "clients": 8},
}
MEMORY = {
    **CONFIGURED,
    "status.text": "compiling",
    **of("planned_memory", algorithm=None),
    "memory_lines.summary": {"total": 3},
}
MEASURE = {
    **CONFIGURED,
    "status.text": "calibrating",
    **of("calibrate"),
    **told("calibrate", theorem=None, seeds=16),
    **of("setting_of"),
    "scaling_table.summary": TOLD,
}
SPEEDUP = {
    **MEASURE,
    **told("measure_speedup", setting_of="made", kind=LocalBSGVRM, calibration="watch"),
    **told("measure_speedup", clients=[1, 2, 4, 8, 16], iterations=[120], seeds=16),
    **told("measure_speedup", period_factor=1.0, target=None, watch="now"),
}
COMPLEXITY = {
    **MEASURE,
    **told("measure_complexity", setting_of="made", kind=LocalBSGVRM),
    **told("measure_complexity", calibration="watch", clients=[1, 2, 4, 8]),
    **told("measure_complexity", targets=[0.25], seeds=16, watch="now"),
    # Several numbers of clients are the axis, so that one target does.
    **told("default_targets", calibration="watch", clients=8, periods=(1,)),
}
THEOREM = ("--theorem 3", {"theorem": 3})
TASK = {"experiment.task": "minimax"}
BSGM = {"experiment.algorithm": "local-bsgm"}
OUT = {
    "write_json.path": Path("out/summary.json"),
    "write_json.content": TOLD,
    "write_atomically.path": Path("out/figure.png"),
    **told("write_atomically", content="figure", mode=0o666),
    "draw_scaling.summary": TOLD,
}
CASES = {
    "check-theory": Case(
        "check-theory quadratic",
        CHECKS,
        {
            **CONFIGURED,
            "status.text": "measuring constants",
            **of("check_theory"),
            "check_theory.given": {},
            "estimates_table.estimates": {"mu": 1},
            "conditions_table.summary": {"largest": {"eta": 0.5}},
        },
        {
            **shared("check-theory"),
            "task": ("check-theory minimax", TASK),
            "algorithm": ("--algorithm local-bsgm", BSGM),
            "constants": (
                "--constant mu=0.5 --constant l0=2",
                {"check_theory.given": {"mu": 0.5, "l0": 2.0}},
            ),
            "as_json": (
                "--json",
                {
                    "print_json.summary": {
                        "largest": {"eta": 0.5},
                        "estimates": {"mu": 1},
                    },
                    "estimates_table.estimates": GONE,
                    "conditions_table.summary": GONE,
                },
            ),
        },
    ),
    "plan": Case(
        "plan --target 0.5",
        PLANS,
        PLAN,
        {
            **shared("plan"),
            "task": ("plan minimax --target 0.5", TASK),
            "algorithm": ("--algorithm local-bsgm", BSGM),
            "clients": ("--clients 3", {"planned.clients": 3}),
            "target": ("--target 0.25", {"planned.target": 0.25}),
            "iterations": (
                "plan --iterations 90",
                {"planned.iterations": 90, "planned.target": None},
            ),
            "preset": ("--preset theory", {"planned.preset": "theory"}),
            "theorem": THEOREM,
            "constants": ("--constant mu=0.5", {"planned.given": {"mu": 0.5}}),
            "seeds": ("--seeds 3", {"planned.seeds": 3}),
            "model_devices": ("", {}),  # of --memory alone, see below
            "out": (
                "--out plan.json",
                {
                    "write_json.path": Path("plan.json"),
                    "write_json.content": {"algorithm": "local-bsgvrm", "clients": 8},
                },
            ),
            "as_json": (
                "--json",
                {
                    "print_json.summary": {"algorithm": "local-bsgvrm", "clients": 8},
                    "plan_table.plan": GONE,
                },
            ),
        },
    ),
    "plan --memory": Case(
        "plan --memory",
        REMEMBERS,
        MEMORY,
        {
            **shared("plan", "algorithm", "batch", "data", "settings"),
            **shared("plan", "label", "group", "ignore", "model_devices"),
            "memory": ("", {}),
            "task": ("plan minimax --memory", TASK),
            "clients": ("--clients 3", {"experiment.clients": 3}),
            "out": (
                "--out plan.json",
                {
                    "write_json.path": Path("plan.json"),
                    "write_json.content": {"total": 3},
                },
            ),
            "as_json": (
                "--json",
                {"print_json.summary": {"total": 3}, "memory_lines.summary": GONE},
            ),
        },
    ),
    "speedup": Case(
        "speedup quadratic",
        SCALES,
        SPEEDUP,
        {
            **shared("speedup"),
            "task": (
                "speedup minimax",
                {**TASK, "scaling_table.summary": {**TOLD, "task": "minimax"}},
            ),
            "algorithm": (
                "--algorithm local-bsgm",
                {
                    **BSGM,
                    "measure_speedup.kind": LocalBSGM,
                    "scaling_table.summary": {**TOLD, "algorithm": "local-bsgm"},
                },
            ),
            "theorem": THEOREM,
            "clients": ("--clients 3,5", {"measure_speedup.clients": [3, 5]}),
            "iterations": (
                "--iterations 30,60",
                {"measure_speedup.iterations": [30, 60]},
            ),
            "target": ("--target 0.5", {"measure_speedup.target": 0.5}),
            "period_factor": (
                "--period-factor 2",
                {"measure_speedup.period_factor": 2.0},
            ),
            "seeds": ("--seeds 3", {"seeds": 3}),
            "out": ("--out out", OUT),
            "as_json": (
                "--json",
                {"print_json.summary": TOLD, "scaling_table.summary": GONE},
            ),
        },
    ),
    "complexity": Case(
        "complexity quadratic",
        SCALES,
        COMPLEXITY,
        {
            **shared("complexity"),
            "task": (
                "complexity minimax",
                {**TASK, "scaling_table.summary": {**TOLD, "task": "minimax"}},
            ),
            "algorithm": (
                "--algorithm local-bsgm",
                {
                    **BSGM,
                    "measure_complexity.kind": LocalBSGM,
                    "scaling_table.summary": {**TOLD, "algorithm": "local-bsgm"},
                },
            ),
            "theorem": THEOREM,
            # With one number of clients the targets are the axis.
            "clients": (
                "--clients 3",
                {
                    "measure_complexity.clients": [3],
                    "default_targets.clients": 3,
                    "default_targets.periods": (3, 4, 6),
                },
            ),
            "targets": (
                "--targets 0.5,1",
                {
                    "measure_complexity.targets": [0.5, 1.0],
                    **dict.fromkeys(
                        told("default_targets", calibration=0, clients=0, periods=0),
                        GONE,
                    ),
                },
            ),
            "seeds": ("--seeds 3", {"seeds": 3}),
            "out": ("--out out", OUT),
            "as_json": (
                "--json",
                {"print_json.summary": TOLD, "scaling_table.summary": GONE},
            ),
        },
    ),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


(
    test_without_options_a_command_passes_on_its_defaults,
    test_an_option_changes_what_it_is_for_and_nothing_else,
) = checks_of(CASES)


@pytest.mark.parametrize("command", ["check-theory", "plan", "speedup", "complexity"])
def test_every_option_has_a_row(command):
    assert not uncovered(CASES, command)
