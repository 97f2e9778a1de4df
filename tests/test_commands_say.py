"""What commands print, word by word, and on which of the two streams."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli import output, predictions, running
from fedbilevel.cli.app import app
from fedbilevel.cli.node import check_security
from fedbilevel.cli.progress import spark_line
from fedbilevel.cli.theory import _size, memory_lines
from fedbilevel.datasets.preparation import Unseen
from fedbilevel.errors import InvalidInputError
from tests import (
    test_wiring,
    test_wiring_folders,
    test_wiring_sites,
    test_wiring_theory,
)
from tests.wiring import passed_on, spy


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(monkeypatch):
    """Return all that is printed, each with its stream."""
    lines: list[tuple[str, Any]] = []

    def print_(self, what, **_):
        lines.append(("err" if self.stderr else "out", what))

    monkeypatch.setattr("fedbilevel.cli.output.Console.print", print_)
    return lines


def test_a_trial_says_what_a_deployment_types_and_what_sites_count(monkeypatch):
    case = test_wiring_sites.CASES["federate"]
    place = "fedbilevel.cli.federation._say"
    case = case._replace(spied={k: v for k, v in case.spied.items() if k != place})
    said: list[str] = []
    monkeypatch.setattr(place, said.append)
    passed_on(case, "", monkeypatch)
    assert said == [
        "In a real deployment, on the server, behind the proxy of docs/deployment.md, "
        "and at every site:\n  deployed",
        "Words.",
    ]
    passed_on(case, "federate quadratic --out other --json", monkeypatch)
    assert len(said) == 2


def test_what_a_site_reports_is_printed_as_it_is(monkeypatch, printed):
    case = test_wiring_sites.CASES["node"]
    place = "fedbilevel.experiments.sites.build_site"

    def reports(given):
        given["report"]("a packet of [bold]node 3[/bold]")
        given["report"]("a packet of [bold]node 3[/bold]")  # is said once

    passed_on(case._replace(spied={**case.spied, place: reports}), "", monkeypatch)
    assert printed == [("err", "a packet of [bold]node 3[/bold]")]


THEORY, FOLDERS = test_wiring_theory.CASES, test_wiring_folders.CASES
SAID = [
    (THEORY["plan"], "", ["table", "Note: noted"]),
    (
        THEORY["plan"],
        "--out plan.json",
        ["table", "Note: noted", "Run it: fedbilevel run quadratic --plan plan.json"],
    ),
    (THEORY["plan --memory"], "", ["line"]),
    (THEORY["speedup"], "", ["table"]),
    (
        THEORY["complexity"],
        "--out out",
        ["table", "Saved in out: summary.json, figure.png"],
    ),
    (
        THEORY["check-theory"],
        "",
        ["table", "table", "The largest steps with which all hold: eta = 0.5"],
    ),
    (FOLDERS["label-counts"], "", ["table"]),
    (FOLDERS["label-counts"], "--out c.png", ["table", "Saved in c.png"]),
    (FOLDERS["predict"], "", ["table", "said"]),
    (FOLDERS["predict"], "--out found.csv", ["said"]),
    (FOLDERS["report"], "", ["Saved in run/report.html"]),
    (FOLDERS["dashboard"], "", ["http://here until Ctrl-C"]),
    (
        FOLDERS["replay"],
        "replay run",
        ["Largest difference of the final points: 0.5"],
    ),
    (test_wiring.CASES["tune"], "--out out", ["Saved in out"]),
    (
        test_wiring.CASES["compare"],
        "--out out",
        ["Saved in out: results, comparison.json, curves.png, report"],
    ),
]


@pytest.mark.parametrize(("case", "words", "lines"), SAID)
def test_a_command_says_what_it_found_and_where_it_is(
    case, words, lines, tmp_path, monkeypatch, printed
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").touch()
    passed_on(case, words, monkeypatch)
    assert printed == [("out", line) for line in lines]


@pytest.mark.parametrize(
    "case", [THEORY["plan"], THEORY["speedup"], FOLDERS["predict"]]
)
def test_with_json_nothing_else_is_printed(case, monkeypatch, printed):
    passed_on(case, "--json", monkeypatch)
    assert not printed


@pytest.mark.parametrize(
    ("insecure", "certificates", "keys", "told"),
    [
        (False, "c", "kk", ""),
        (True, "", "", ""),
        (True, "", "kk", ""),
        (True, "c", "", "--insecure and certificates exclude each other"),
        (True, "", "k", "give --server-key, or"),
        (False, "", "kk", "give --ca, or"),
        (False, "c", "k", "give --server-key, or"),
        (False, "", "", "give --ca and --private-key and --server-key, or"),
    ],
)
def test_a_connection_is_protected_wholly_or_not_at_all(
    insecure, certificates, keys, told
):
    own = {"private-key": keys[:1], "server-key": keys[1:]}
    if not told:
        check_security(insecure, {"ca": certificates}, own)
        return
    with pytest.raises(InvalidInputError, match=told):
        check_security(insecure, {"ca": certificates}, own)


def test_a_server_without_certificates_may_have_keys(monkeypatch):
    words = "--private-key k --node-key 0.pub --node-key 1.pub"
    case = test_wiring_sites.CASES["serve --insecure"]
    seen = passed_on(case, words, monkeypatch)
    assert seen["serve_over_flower.served.keys.private"] == Path("k")
    assert seen["serve_over_flower.link.certificates"] is None


def test_as_many_keys_as_clients(tmp_path):
    line = "serve quadratic --clients 3 --out out --insecure --private-key k "
    done = CliRunner().invoke(app, [*line.split(), "--node-key", "0.pub"])
    assert done.exit_code == 2
    told = "1 times --node-key for 3 clients: give one for each, in their order."
    assert told in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_a_search_is_shown_with_its_trials_cost_and_command(monkeypatch, printed):
    seen: dict = {}
    spy(monkeypatch, "fedbilevel.report.trials_table", lambda given: "table", seen)
    found: Any = SimpleNamespace(
        experiment=SimpleNamespace(algorithm="fedbio"),
        trials=[({"lr_x": "1"}, 0.5, 3)],
        found=SimpleNamespace(judged_by="loss", cost=12345, unit="samples"),
        command="fedbilevel run",
    )
    running._show_tuned(found, running.Console())
    assert list(seen.values()) == [{"fedbio": found.trials}, "loss"]
    assert printed == [
        ("out", "table"),
        ("out", "They took 12,345 samples. To run with the best:"),
        ("out", "fedbilevel run"),
    ]


def test_a_search_goes_on_in_its_own_folder_and_in_no_other(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "something").touch()
    with pytest.raises(Exception, match="is not empty"):
        running._new_search({"out": folder})
    (folder / "search.json").touch()
    running._new_search({"out": folder})
    running._new_search({"out": None})


def result_of(**more: Any) -> Any:
    usual = {"quality": None, "events": (), "ended": "", "algorithm": "fedbio"}
    return SimpleNamespace(**usual | more, summary=lambda: {"rounds": 3})


def test_a_result_is_shown_in_order(monkeypatch, printed):
    for name in ("result_table", "cost_table"):
        monkeypatch.setattr(
            f"fedbilevel.report.{name}", lambda given, n=name: (n, given)
        )
    monkeypatch.setattr("fedbilevel.report.quality_tables", lambda given: ["quality"])
    wrote: list[Path] = []
    monkeypatch.setattr("fedbilevel.cli.output.write_report", wrote.append)
    found = result_of(
        quality={"sentence": "It is good."},
        events=["smaller steps", "rolled back"],
        ended="at its target",
    )
    output.show_result(found, Path("run"), as_json=False)
    assert wrote == [Path("run")]
    assert printed == [
        ("out", "It is good."),
        ("out", "quality"),
        ("out", ("result_table", {"fedbio": found})),
        ("out", ("cost_table", {"fedbio": found})),
        ("out", "Note: smaller steps."),
        ("out", "Note: rolled back."),
        ("out", "Ended at its target."),
        ("out", "Saved in run"),
    ]
    printed.clear()
    output.show_result(result_of(), None, as_json=False)
    assert [one[0] for _, one in printed] == ["result_table", "cost_table"]
    assert wrote == [Path("run")]


def test_a_result_in_json_is_one_line(monkeypatch, printed, capsys):
    wrote: list[Path] = []
    monkeypatch.setattr("fedbilevel.cli.output.write_report", wrote.append)
    output.show_result(result_of(), Path("run"), as_json=True)
    assert capsys.readouterr().out == '{"rounds": 3}\n'
    assert wrote == [Path("run")] and not printed


def test_what_clients_hold_is_said_on_the_other_stream(monkeypatch, printed):
    notes = lambda held: ["first", "second"]  # noqa: E731
    monkeypatch.setattr("fedbilevel.report.holdings_notes", notes)
    monkeypatch.setattr("fedbilevel.report.holdings_table", lambda held: "table")
    for own, wanted in ((True, ["first", "table", "second"]), (False, notes(0))):
        printed.clear()
        task: Any = SimpleNamespace(origin=SimpleNamespace(summary={"own": own}))
        output.show_data(task)
        assert printed == [("err", one) for one in wanted]
    printed.clear()
    output.show_data(SimpleNamespace(origin=None))  # type: ignore[arg-type]
    assert not printed


MEMORY = {
    "algorithm": "fedbio",
    "task": "quadratic",
    "clients": 8,
    "clients_at_once": 2,
    "device": "gpu",
    "model_devices": 1,
    "frozen": 2_500_000_000,
    "rows": 1_000_000,
    "state": 2000,
    "working": 1500,
    "total": 2_501_001_500,
    "limit": None,
    "fits": True,
    "advice": [],
}


def test_a_plan_of_memory_says_what_is_large():
    assert memory_lines(MEMORY) == [
        "fedbio on quadratic, 8 clients, 2 at a time, on gpu:",
        "    2.5 GB  the frozen model",
        "      1 MB  rows of all clients, and of tests",
        "      2 kB  what is trained: x, the copies of y, and what methods keep of "
        "them",
        "    1.5 kB  intermediate values of the clients that work at a time",
        "    2.5 GB  in all, with small inputs and outputs",
        "The device does not say how much it has.",
    ]
    less = {"model_devices": 2, "limit": 10**9, "fits": False, "advice": ["a", "b"]}
    lines = memory_lines({**MEMORY, **less})
    assert lines[0].endswith("on gpu, one of 2 that share the model:")
    assert lines[-2:] == [
        "      1 GB  on the device: it does not fit.",
        "Less: a, or b.",
    ]
    assert memory_lines({**MEMORY, "limit": 10**9})[-1].endswith("device: it fits.")


def test_sizes_are_in_the_largest_unit():
    sizes = {10**9: "1 GB", 10**9 - 10**7: "990 MB", 10**6: "1 MB", 500: "0.5 kB"}
    sizes |= {999_999: "1 MB", 999_499: "999 kB", 10**9 - 1: "1 GB"}
    assert {count: _size(count) for count in sizes} == sizes


def found_of(count, **more: Any) -> Any:
    summary = {"rows": count, **more.pop("summary", {})}
    usual = {"summary": lambda: summary, "unseen": None, "notes": (), "name": "sick"}
    return SimpleNamespace(**usual | more)


def test_predictions_are_told_in_sentences():
    assert predictions.sentences(found_of(10), None) == ["10 rows."]
    assert predictions.sentences(found_of(11), None) == [
        "11 rows.",
        "The first 10 are shown. --out FILE keeps all.",
    ]
    told = predictions.sentences(
        found_of(
            5,
            summary={
                "predicted": {"yes": 2, "no": 3},
                "accuracy": 0.81234,
                "root_mean_squared_error": 1.234567,
                "rows_with_unseen": 2,
            },
            unseen=[Unseen(0, "a", "u"), Unseen(1, "a", "u"), Unseen(1, "b", "v")],
            notes=("Read so.",),
        ),
        Path("out.csv"),
    )
    assert told == [
        "5 rows: 3 no, 2 yes.",
        "Accuracy 0.8123, by the labels in 'sick'.",
        "Root mean squared error to 'sick': 1.2346.",
        "Unseen: 2 rows hold texts that the model does not know, and are predicted "
        "without them: a=u (2), b=v (1). --unseen error refuses them.",
        "Read so.",
        "Saved in out.csv",
    ]


def test_a_spark_line_shows_the_latest_twelve():
    assert spark_line([0, 7]) == "▁█" and spark_line([3, 3]) == "▁▁"
    assert spark_line(list(range(8))) == "▁▂▃▄▅▆▇█"
    assert spark_line([100.0, *[0.0] * 12]) == "▁" * 12
    assert spark_line([np.nan, np.inf, 1.0]) == "▁" and spark_line([]) == ""
