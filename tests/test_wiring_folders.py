"""Every option of the commands on rows, models, folders and lists goes where it must.

As in `test_wiring`, what is passed on stands here whole, by hand.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedbilevel.experiments import Experiment
from tests import test_wiring, test_wiring_sites, test_wiring_theory
from tests.wiring import (
    COMMANDS,
    GONE,
    SHARED,
    Case,
    checks_of,
    nothing,
    of,
    passed_on,
    shared,
    told,
    uncovered,
)

CHOICES = dict.fromkeys(("label", "site", "group", "ignore", "preparation"), "")
CHOICES |= dict.fromkeys(("separator", "decimal", "encoding"), "")
CHOICES |= {"missing": "refuse", "label_kind": "auto"}


def chosen(*names, end="choices"):
    """Return rows of options that say how a table is read."""
    rows = {}
    for name in names:
        words, changes = SHARED[name]
        (value,) = changes.values()
        rows[name] = words, {f"{end}.{name}": value}
    return rows


def a_table(given):
    del given
    return "table"


FILES = {
    "fedbilevel._files.write_atomically": nothing,
    "fedbilevel.cli.results.print_json": nothing,
    "fedbilevel.cli.data.print_json": nothing,
}
BUILT = SimpleNamespace(classes=("no", "yes"), names=("north",))
LEVELS = {"training": [[1, 2]]}
COUNTS = {
    **FILES,
    "fedbilevel.experiments.Experiment.build_task": lambda given: (BUILT, {}, {}),
    "fedbilevel.cli.data.counts_by_level": lambda given: LEVELS,
    "fedbilevel.report.draw_label_counts": lambda given: "picture",
    "fedbilevel.report.label_counts_table": a_table,
}
COUNT = {
    **of("build_task"),
    "build_task.data": None,
    "counts_by_level.task": "watch",
    **told("label_counts_table", counts=LEVELS["training"], class_names=BUILT.classes),
    **told("label_counts_table", title="Rows for training", client_names=BUILT.names),
}
FOUND = SimpleNamespace(
    header=lambda: ["row"], rows=lambda: [[0]], summary=lambda: {"rows": 1}
)
PREDICTS = {
    **FILES,
    "fedbilevel.models.Model.load": lambda given: "model",
    "fedbilevel.cli.predictions.predicted": lambda given: FOUND,
    "fedbilevel.cli.predictions.first_rows": a_table,
    "fedbilevel.cli.predictions.sentences": lambda given: ["said"],
}
PREDICT = {
    **told("load", folder=Path("run")),
    **told("predicted", model="model", source="rows.csv", keep=(), strict=False),
    **told("predicted.choices", **CHOICES),
    "first_rows.found": "watch",
    **told("sentences", found="watch", out=None),
}
SUMS = SimpleNamespace(columns=["a"], rows=3, sites=(3,), to_json=lambda: "sums")
PREPARES = {
    **FILES,
    "fedbilevel.cli.data._sums_in": lambda given: given["path"].name,
    "fedbilevel.datasets.Sums.merged": lambda given: SUMS,
}
PREPARE = {
    **told("_sums_in", path=Path("b.csv"), minimum=10),
    **told("_sums_in.choices", **CHOICES),
    "merged.every": ["a.csv", "b.csv"],
    **told("write_atomically", path=Path("sums.json"), content="sums", mode=0o666),
}
PAGES = {
    **FILES,
    "fedbilevel._files.mode_in": lambda given: 0o640,
    "fedbilevel.cli.dashboard.page_of": lambda given: "page",
}
ADVISES = {
    "fedbilevel.cli.listing.print_json": nothing,
    "fedbilevel.experiments.recommendation.recommend": lambda given: [],
}
DEPLOYED = SimpleNamespace(point={"x": [1.0, 2.25], "y": [3.5]})
SIMULATED = SimpleNamespace(point=lambda server: SimpleNamespace(x=[1.0, 2.0], y=[4.0]))
REPLAYS = {
    "fedbilevel.experiments.Experiment.load": lambda given: Experiment("quadratic"),
    "fedbilevel.cli.federation.require_trust": nothing,
    "fedbilevel.runtime.configure": nothing,
    "fedbilevel.experiments.federated.replay": lambda given: (
        DEPLOYED,
        SimpleNamespace(state=SimpleNamespace(server="server")),
        SIMULATED,
    ),
    "fedbilevel.studies.single.named_leaves": lambda given: {
        given["prefix"]: np.asarray(given["tree"])
    },
    "fedbilevel.cli.federation.print_json": nothing,
}
REPLAY = {
    **told("load", folder=Path("run")),
    **of("require_trust"),
    **told("configure", precision="float32", cores=None),
    **told("replay", folder=Path("run")),
    **told("named_leaves", prefix="y", tree=[4.0]),
    "print_json.summary": {"largest_difference": 0.5},
}


class Server:
    """A dashboard that ends at once."""

    address = "http://here"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def serve_forever(self):
        raise KeyboardInterrupt


SITUATION = {"participants": None, "differ": None, "hessian": True}
SITUATION |= {"clients": None, "few_rounds": False, "question": None}
ONE = SimpleNamespace(
    name="one", summary="s", answers="a", reference="r", provenance=""
)
SEEKS = {"fedbilevel.experiments.traits.fitting": lambda given: [ONE]}
CASES = {
    "label-counts": Case(
        "label-counts quadratic",
        COUNTS,
        COUNT,
        {
            **shared("label-counts"),
            "task": ("label-counts minimax", {"experiment.task": "minimax"}),
            "out": (
                "--out counts.png",
                {
                    **told(
                        "draw_label_counts", levels=LEVELS, class_names=BUILT.classes
                    ),
                    "draw_label_counts.client_names": BUILT.names,
                    "write_atomically.path": Path("counts.png"),
                    **told("write_atomically", content="picture", mode=0o666),
                },
            ),
            "as_json": (
                "--json",
                {
                    "print_json.summary": {
                        "classes": BUILT.classes,
                        "names": BUILT.names,
                        **LEVELS,
                    },
                    **dict.fromkeys((one for one in COUNT if "_table" in one), GONE),
                },
            ),
        },
    ),
    "predict": Case(
        "predict run rows.csv",
        PREDICTS,
        PREDICT,
        {
            **chosen("missing", "separator", "decimal", "encoding"),
            "folder": ("predict other rows.csv", {"load.folder": Path("other")}),
            "data": ("predict run more.csv", {"predicted.source": "more.csv"}),
            "keep": ("--keep id,date", {"predicted.keep": ("id", "date")}),
            "unseen": ("--unseen error", {"predicted.strict": True}),
            "out": (
                "--out found.csv",
                {
                    **told("write_atomically", path=Path("found.csv"), mode=0o666),
                    "write_atomically.content": "row\n0\n",
                    "sentences.out": Path("found.csv"),
                    "first_rows.found": GONE,
                },
            ),
            "as_json": (
                "--json",
                {
                    "print_json.summary": {"rows": 1},
                    "first_rows.found": GONE,
                    "sentences.found": GONE,
                    "sentences.out": GONE,
                },
            ),
        },
    ),
    "prepare": Case(
        "prepare a.csv b.csv --sums sums.json",
        PREPARES,
        PREPARE,
        {
            **chosen("label", "site", "group", "ignore", "missing", "label_kind"),
            **chosen("separator", "decimal", "encoding"),
            "files": (
                "prepare b.csv c.csv --sums sums.json",
                {"_sums_in.path": Path("c.csv"), "merged.every": ["b.csv", "c.csv"]},
            ),
            "sums": ("--sums s.json", {"write_atomically.path": Path("s.json")}),
            "minimum_rows": ("--minimum-rows 3", {"_sums_in.minimum": 3}),
            "out": ("", {}),  # see the test of what it says
        },
    ),
    "report": Case(
        "report run",
        PAGES,
        {
            **told("page_of", folder=Path("run"), refresh=0),
            "mode_in.folder": Path("run"),
            "write_atomically.path": Path("run/report.html"),
            **told("write_atomically", content="page", mode=0o640),
        },
        {
            "folder": (
                "report other",
                {
                    "page_of.folder": Path("other"),
                    "mode_in.folder": Path("other"),
                    "write_atomically.path": Path("other/report.html"),
                },
            ),
            "out": ("--out page.html", {"write_atomically.path": Path("page.html")}),
        },
    ),
    "replay": Case(
        "replay run --json",
        REPLAYS,
        REPLAY,
        {
            "folder": ("replay other --json", {"folder": Path("other")}),
            "trust_code": ("--trust-code", {}),
            "as_json": ("replay run", {"print_json.summary": GONE}),
        },
    ),
    "dashboard": Case(
        "dashboard run",
        {"fedbilevel.cli.dashboard.Dashboard": lambda given: Server()},
        told("Dashboard", folder=Path("run"), port=8765),
        {
            "folder": ("dashboard other", {"Dashboard.folder": Path("other")}),
            "port": ("--port 9000", {"Dashboard.port": 9000}),
        },
    ),
    "recommend": Case(
        "recommend --json",
        ADVISES,
        {
            **told("recommend.situation", **SITUATION),
            "recommend.task": None,
            "recommend.rows": None,
            "print_json.summary": {"recommended": []},
        },
        {
            "task": ("recommend quadratic --json", {"recommend.task": "quadratic"}),
            "clients": ("--clients 3", {"situation.clients": 3}),
            "participants": ("--participants 2", {"situation.participants": 2}),
            "differ": ("--differ", {"situation.differ": True}),
            "no_hessian": ("--no-hessian", {"situation.hessian": False}),
            "few_rounds": ("--few-rounds", {"situation.few_rounds": True}),
            "question": ("--question own-y", {"situation.question": "own-y"}),
            "as_json": ("recommend", {"print_json.summary": GONE}),
        },
    ),
    "list": Case(
        "list algorithms --known read",
        SEEKS,
        told("fitting", question=None, needs=[], without=[], known="read"),
        {
            "kind": ("", {}),
            "name": ("", {}),  # excludes all others; see tests of lists
            "question": ("--question own-y", {"fitting.question": "own-y"}),
            "needs": (
                "--needs hessian,alike-clients",
                {"fitting.needs": ["hessian", "alike-clients"]},
            ),
            "without": ("--without hessian", {"fitting.without": ["hessian"]}),
            "known": ("--known partly", {"fitting.known": "partly"}),
        },
    ),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").touch()


(
    test_without_options_a_command_passes_on_its_defaults,
    test_an_option_changes_what_it_is_for_and_nothing_else,
) = checks_of(CASES)


@pytest.mark.parametrize("command", CASES)
def test_every_option_has_a_row(command):
    assert not uncovered(CASES, command)


def test_every_command_has_a_table():
    every = (
        CASES,
        test_wiring.CASES,
        test_wiring_sites.CASES,
        test_wiring_theory.CASES,
    )
    tried = {case.line.split()[0] for cases in every for case in cases.values()}
    # That one hands over a file and a model; see `test_prepared_and_exported`.
    assert set(COMMANDS) == tried | {"export"}


@pytest.mark.parametrize(
    ("settings", "more"),
    [({}, False), ({"aggregate": "secure"}, True), ({"noise": 1.0}, True)],
)
def test_a_replay_says_how_far_it_is_and_why_it_may_be(settings, more, monkeypatch):
    spied = {
        **REPLAYS,
        "fedbilevel.experiments.Experiment.load": lambda given: Experiment(
            "quadratic", **settings
        ),
    }
    said = []
    monkeypatch.setattr(
        "fedbilevel.cli.output.Console.print", lambda self, text: said.append(text)
    )
    passed_on(Case("replay run", spied, {}, {}), "", monkeypatch)
    assert said[0] == "Largest difference of the final points: 0.5"
    assert len(said) == 1 + more
