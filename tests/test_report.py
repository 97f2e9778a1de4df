"""A report tells what was saved, exactly, and nothing in a file can take it over."""

import json
import shlex
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import typer.main
from typer.testing import CliRunner

from fedbilevel._files import read_arrays, write_arrays
from fedbilevel.cli.app import app
from fedbilevel.cli.arguments import EXPERIMENT
from fedbilevel.cli.output import write_report
from fedbilevel.deployment import serving
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import shared_settings
from fedbilevel.experiments.run_folder import comparison_command, run_command
from fedbilevel.experiments.tuning import Tuning
from fedbilevel.report import holdings_table
from fedbilevel.report.page import document
from fedbilevel.report.page.sections import Grid
from fedbilevel.report.page.sites import _judged_bars
from fedbilevel.result import Result
from fedbilevel.runtime import checkpoint
from fedbilevel.saved import find_saved, read_saved
from tests.reports import (
    HOSTILE,
    Read,
    made_up,
    made_up_quality,
    save_comparison,
    save_run,
)
from tests.test_layers import ROOT, third_parties

QUALITY = made_up_quality()
LARGEST = 5_000_000  # bytes of a page


def assert_same(shown: list[Any], saved: np.ndarray) -> None:
    """Compare numbers of a page with a column, in its own precision."""
    found = np.asarray([float(value) for value in shown]).astype(saved.dtype)
    np.testing.assert_array_equal(found, saved)


def test_the_numbers_of_a_page_are_the_saved_columns(tmp_path):
    whole = made_up("one")
    odd = np.asarray([np.nan, np.inf, -np.inf, 1 / 3, 1e-30, 3e38, 0.1, *range(5)])
    columns = {**whole.columns, "odd": odd.astype(np.float32), "odder": odd / 7}
    save_run(tmp_path, replace(whole, columns=columns))
    (run,) = Read(tmp_path).data["curves"]["runs"]
    saved = read_arrays(tmp_path / "columns.npz")
    assert set(run["columns"]) == set(saved) and "odd" in saved
    for name, column in saved.items():
        assert_same(run["columns"][name], column)


def test_a_comparison_has_the_columns_of_every_seed_and_is_small(tmp_path):
    names = {name: 1000 for name in "one two three four five".split()}
    page = Read(save_comparison(tmp_path, names, seeds=4, rounds=200))
    runs = page.data["curves"]["runs"]
    assert len(runs) == 20
    assert page.data["curves"]["step"] == 1
    for run in runs:
        place = tmp_path / run["name"] / f"seed-{run['seed']}"
        for name, column in read_arrays(place / "columns.npz").items():
            assert_same(run["columns"][name], column)
    assert len(page.page.encode()) < LARGEST


def test_a_long_run_is_thinned_aloud_and_keeps_its_end(tmp_path):
    save_run(tmp_path, made_up("one", rounds=90_000))
    page = Read(tmp_path)
    curves = page.data["curves"]
    # 6 columns of 90,000 numbers; 200,000 are in a page.
    assert curves["step"] == 3
    assert "Of 3 measurements in a row one is in this page" in page.text
    rounds = curves["runs"][0]["columns"]["round"]
    assert rounds == list(range(3, 90_001, 3))
    assert len(page.page.encode()) < LARGEST


def hostile_run(folder: Path) -> Path:
    sites = [{"name": HOSTILE, "classes": {HOSTILE: 2, "x" * 500: 1}}]
    done = dict.fromkeys(("label", "source", "left_out"), HOSTILE)
    about = {"sites": sites, "remarks": [HOSTILE], "encoded": {HOSTILE: [HOSTILE]}}
    config = {"data": {**about, **done}, HOSTILE: HOSTILE}
    quality = made_up_quality(HOSTILE)
    one = made_up(
        HOSTILE, task="regularization", ended=HOSTILE, config=config, quality=quality
    )
    columns = {**one.columns, HOSTILE: one.columns["upper_loss"]}
    final = {**one.final, HOSTILE: HOSTILE, f"accuracy_site_{HOSTILE}": 0.5}
    final["operations"] = [HOSTILE]
    save_run(folder, replace(one, columns=columns, final=final))
    text = HOSTILE.replace('"', '""')
    rows = f'file,weight,"{text}"\n"{text}",0.5,1\n'
    (folder / "suspicious.csv").write_text(rows)
    columns = {"columns": [{"name": HOSTILE, "values": [HOSTILE, "a", "b"]}]}
    (folder / "model.json").write_text(json.dumps({"preparation": columns}))
    experiment = Experiment("numbers", options={HOSTILE: HOSTILE})
    experiment.save(folder)
    return folder


def test_names_from_files_stay_text(tmp_path):
    page = Read(hostile_run(tmp_path))
    scripts = [about for tag, about in page.elements if tag == "script"]
    assert [one.get("id") for one in scripts] == ["data", "plotly", None]
    assert not any(tag == "img" for tag, _ in page.elements)
    for _, about in page.elements:
        assert not any(name.startswith("on") for name in about)
    assert page.text.count(HOSTILE) >= 8
    assert HOSTILE in page.data["curves"]["metrics"]
    assert any(HOSTILE[:50] in one for one in page.data["bars"][0]["labels"])


def test_a_page_says_first_how_good_the_model_is(tmp_path):
    quality = made_up_quality()
    config = {"data": {"label": "ill"}, "clients": 3}
    result = made_up(
        "one", config=config, quality=quality, events=[*quality["warnings"], "more"]
    )
    page = Read(save_run(tmp_path, result))
    assert page.text.lstrip().startswith("Predicting ill: a model of 3 sites")
    assert page.text.index(quality["sentence"]) < page.text.index("ran 12 rounds")
    assert page.text.count("Warning: worse off: North.") == 1
    assert "Note: more." in page.text and "Note: worse off" not in page.text
    assert "upper_loss, the loss on the validation rows," in page.text
    headings = [text for text in page.texts if text.endswith("?")]
    assert headings == [
        "Is every site better off?",
        "Can its probabilities be believed?",
    ]
    sites, models, chances = page.data["bars"][:3]
    assert sites["series"] == {"shared model": [0.6], "site alone": [0.3]}
    np.testing.assert_allclose(sites["intervals"]["site alone"], [[0.2, 0.4]])
    assert models["labels"] == ["shared model", "base rate", "North alone"]
    assert chances["points"] == quality["calibration"]["bins"]


@pytest.mark.parametrize(("count", "told"), [(20, None), (23, "and 3 more")])
def test_a_table_of_sites_says_how_many_more_there_are(count, told):
    site = {"training": 8, "validation": 2, "classes": {"ill": 3, "well": 7}}
    sites = [{"name": f"site {k}", **site} for k in range(count)]
    table = holdings_table({"sites": sites, "site_column": "hospital"})
    assert table.row_count == 20 and table.caption == told


def test_a_result_keeps_how_good_its_model_is(tmp_path):
    quality = made_up_quality()
    made_up("one", quality=quality).save(tmp_path)
    assert json.loads((tmp_path / "quality.json").read_text()) == quality
    assert "quality" not in json.loads((tmp_path / "result.json").read_text())
    loaded = Result.load(tmp_path)
    assert loaded.quality == loaded.summary()["quality"] == quality
    assert quality["sentence"] in repr(loaded)


def test_a_page_asks_nobody_for_anything(tmp_path):
    page = Read(save_run(tmp_path, made_up("one")))
    for _, about in page.elements:
        for name in ("src", "href", "action", "data"):
            assert (about.get(name) or "#").startswith(("#", "data:"))
    (policy,) = (a["content"] for _, a in page.elements if "http-equiv" in a)
    assert policy and "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


def test_the_summary_of_a_run_says_what_how_and_at_which_cost(tmp_path):
    loss = np.asarray([8.0, 0.25, 0.5])
    one = made_up("one", rounds=3)
    result = replace(one, columns={**one.columns, "upper_loss": loss})
    text = Read(save_run(tmp_path, result)).text
    assert "one ran 3 rounds on the task numbers with 3 sites, 2 of them" in text
    assert "It ended after all 3 rounds." in text
    assert "went from 8 after round 1 to 0.5 after round 3" in text
    assert "its best was 0.25 after round 2" in text
    # 3 rounds of 1000 bytes, of which half is 1500 // 1.
    assert "sent 0.003 MB (0.0015 up, 0.0015 down), drew 30 samples" in text
    assert "took 3 seconds, after 2 seconds of compiling" in text
    assert "not started from the command line" in text


def test_the_summary_of_a_comparison_names_the_best_and_the_cheapest(tmp_path):
    def save(name: str, ends: list[float], price: int) -> None:
        for seed, end in enumerate(ends):
            one = made_up(name, seed, 2, price)
            columns = {**one.columns, "upper_loss": np.asarray([9.0, end])}
            place = tmp_path / name / f"seed-{seed}"
            replace(one, columns=columns).save(place)

    save("dear", [1.0, 2.0, 1.0, 2.0, 1.5], 1_000_000)
    save("cheap", [2.0, 3.0, 2.0, 3.0, 2.5], 10_000)
    save("late", [8.0] * 5, 10)
    save("still", [2.0, 2.2, 2.1, 2.0, 2.2], 0)
    about = {"metric": "upper_loss", "target": 4, "diverged": {"lost": "NaN."}}
    (tmp_path / "comparison.json").write_text(json.dumps(about))
    page = Read(tmp_path)
    text = page.text
    assert "Lowest upper_loss, the main metric: dear with 1.5 \u00b1 0.62." in text
    # 2.7764 deviations over the root of 5 are half of a 95 % interval.
    assert "Next: still with 2.1 \u00b1 0.12: their 95 % intervals overlap" in text
    assert "mean of 5 seeds with its 95 % t interval" in text
    assert "least traffic by cheap (0.02 MB)" in text
    assert "late did not reach upper_loss 4." in text
    assert "still sent nothing: all rows were in one place." in text
    assert "lost diverged: NaN." in text
    names = [run["name"] for run in page.data["curves"]["runs"]]
    assert list(dict.fromkeys(names)) == ["dear", "still", "cheap", "late"]
    assert page.data["table"]["csv"].splitlines()[1].startswith("dear,1.5")
    for damaged in ([1], ["a"], 5):
        text = json.dumps({**about, "diverged": damaged})
        (tmp_path / "comparison.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"comparison.json is damaged"):
            read_saved(tmp_path)


def test_scales_go_with_the_page(tmp_path):
    names = {"one": 1, "two": 1000}
    curves = Read(save_comparison(tmp_path, names)).data["curves"]
    scales = {"upper_loss": "log", "test_accuracy": "linear"}
    assert curves["metrics"] == scales
    costs = {"exchanges": "linear", "megabytes": "log", "samples": "linear"}
    assert curves["axes"] == {**costs, "rounds": "linear", "seconds": "linear"}
    assert curves["target"] == 0.5


def bars_of(page: Read) -> dict[str, Any]:
    return {one["id"]: one for one in page.data["bars"]}


def test_bars_of_what_is_undefined_have_no_length():
    made = _judged_bars("auc", ["a", "b"], {"shared": [(0.5, 0.4, 0.6), None]}, "AUC")
    (series,) = made["series"].values()
    assert series[0] == 0.5 and (series[1] is None or np.isnan(series[1]))
    first, second = made["intervals"]["shared"]
    assert first == [0.4, 0.6] and np.isnan(second).all()


def test_a_list_of_runs_has_the_last_value_of_each(tmp_path):
    one = made_up("one", rounds=3)
    one = replace(one, columns={**one.columns, "upper_loss": np.asarray([9, 8, 0.125])})
    about = document._about_run("x", read_saved(save_run(tmp_path, one)))
    assert (about["metric"], about["value"], about["rounds"]) == (
        "upper_loss",
        "0.125",
        "3",
    )


def test_strengths_have_the_names_of_their_features(tmp_path):
    x = np.asarray([-1.0, -20.0, 5.0, -2.0])
    columns = [{"name": "age"}, {"name": "sex", "values": ["f", "m"]}]
    about = {"preparation": {"columns": columns}}
    (tmp_path / "model.json").write_text(json.dumps(about))
    one = made_up("one", task="regularization", point={"x": x})
    page = Read(save_run(tmp_path, one))
    drawn = bars_of(page)["strengths"]
    assert drawn["labels"] == ["sex=m", "age", "sex=f"]
    assert "The intercept has the strength 0.135" in page.text
    # Where they are used they lie in [exp(-9), 1].
    expected = [1.0, np.exp(-1), np.exp(-9)]
    np.testing.assert_allclose(drawn["series"]["strength"], expected)


@pytest.mark.parametrize(("apart", "alike"), [(9e-4, True), (1.1e-3, False)])
def test_strengths_that_stayed_alike_are_not_called_large_or_small(
    tmp_path, apart, alike
):
    own = np.log(np.asarray([1.0, 1 - apart]))
    point = {"x.own": own, "x.common": np.asarray(-13.0)}
    one = made_up("one", task="regularization", point=point)
    text = Read(save_run(tmp_path, one)).text
    assert ("All strengths stayed alike" in text) == alike
    assert ("A small one lets it speak" in text) != alike


def test_a_comparison_has_the_names_of_columns(tmp_path):
    point = {"x.own": np.asarray([1.0, 0.0]), "x.common": np.asarray(0.0)}
    data = {"learned": ["age", "sex"], "encoded": {"sex": ["f", "m"]}}
    folder = save_comparison(tmp_path, {"one": 1})
    one = made_up("one", task="regularization", point=point, config={"data": data})
    one.save(folder / "one" / "seed-0")
    assert bars_of(Read(folder))["strengths"]["labels"] == ["age", "sex"]


def test_of_several_runs_a_page_says_which_one_it_shows(tmp_path):
    point = {"x": np.asarray([-1.0, 2.0])}
    one = made_up("one", task="regularization", point=point)
    assert "Shown is" not in Read(save_run(tmp_path / "run", one)).text
    folder = save_comparison(tmp_path / "two", {"one": 2})
    one.save(folder / "one" / "seed-0")
    assert "Shown is one, seed 0." in Read(folder).text


def test_of_many_strengths_the_extremes_are_drawn(tmp_path):
    x = -np.arange(66.0) / 10
    one = made_up("one", task="regularization", point={"x": x})
    page = Read(save_run(tmp_path, one))
    labels = bars_of(page)["strengths"]["labels"]
    assert labels[:2] == ["feature 0", "feature 1"]
    assert labels[-2:] == ["feature 63", "feature 64"]
    assert len(labels) == 30
    assert "Of 65 the 15 largest and the 15 smallest are drawn" in page.text
    assert "feature 30" in page.text


def test_who_holds_what_is_told_by_name(tmp_path):
    sites = [
        {"name": "Kiel", "training": 20, "validation": 10, "classes": {"ill": 30}},
        {"name": "Bonn", "training": 6, "validation": 1, "classes": {"well": 7}},
    ]
    about = {
        "source": "patients.csv",
        "sites": sites,
        "tested": 9,
        "remarks": ["one remark"],
        "label": "outcome",
        "encoded": {"color": ["red", "green"]},
        "left_out": {"id": "numbers the rows"},
    }
    one = made_up("one", config={"clients": 2, "data": about})
    page = Read(save_run(tmp_path, one))
    drawn = bars_of(page)["holdings"]
    assert drawn["labels"] == ["Kiel", "Bonn"] and drawn["stacked"]
    assert drawn["series"] == {"ill": [30, 0], "well": [0, 7]}
    assert "2 sites hold 37 rows of patients.csv. 9 more rows are held out" in page.text
    assert "One remark." in page.text
    assert "a feature for each of its values: red, green" in page.text
    assert "left out: numbers the rows" in page.text


def test_sites_without_classes_are_drawn_by_their_rows(tmp_path):
    about = {"sites": [{"name": "Kiel", "training": 4, "validation": 3}]}
    one = made_up("one", config={"data": about})
    drawn = bars_of(Read(save_run(tmp_path, one)))["holdings"]
    assert drawn["series"] == {"rows": [7]}


@pytest.mark.parametrize("about", [None, 3, "x", [], {"sites": 3}, {"sites": [1]}])
def test_a_run_without_a_summary_of_its_data_says_so(tmp_path, about):
    one = made_up("one", config={"clients": 2, "data": about})
    text = Read(save_run(tmp_path, one)).text
    assert "2 sites. The run did not record how many rows each one has." in text


def test_suspicious_rows_are_shown_by_weight(tmp_path):
    weights = np.random.default_rng(0).permutation(40) / 40
    lines = "".join(f"a.csv,{k},{weight}\n" for k, weight in enumerate(weights))
    (tmp_path / "suspicious.csv").write_text(f"file,row,weight\n{lines}")
    page = Read(save_run(tmp_path, made_up("one")))

    def shown(caption: str) -> list[float]:
        begin = page.texts.index(caption) + 4  # the caption and three headings
        return [float(text) for text in page.texts[begin + 2 : begin + 36 : 3]]

    ascending = list(np.arange(40) / 40)
    assert shown("Dirtiest rows") == ascending[:12]
    assert shown("Cleanest rows") == ascending[:-13:-1]
    assert "All 40 are in suspicious.csv." in page.text


def test_weights_of_sources_are_shown_the_largest_first(tmp_path):
    one = made_up("one", task="reweighting")
    weights = {
        "weight_north/forum": 0.25,
        f"weight_{HOSTILE}": 0.125,
        "weight_b": 0.625,
    }
    page = Read(save_run(tmp_path, replace(one, final={**one.final, **weights})))
    begin = page.texts.index("Weights, the largest first")
    rows = page.texts[begin + 3 : begin + 9]
    assert rows[:4] == ["b", "0.625", "north/forum", "0.25"] and rows[5] == "0.125"
    assert bars_of(page)["source-weights"]["labels"][:2] == ["b", "north/forum"]


def test_operations_and_accuracies_are_shown_for_every_algorithm(tmp_path):
    for name, shift in (("one", 0.0), ("two", 0.1)):
        for seed in range(2):
            ends = {"accuracy_group_0": 0.5 + shift, "accuracy_group_1": 0.2 * seed}
            ends |= {"operations": ["conv3", name], "retrained_accuracy": 0.9}
            result = made_up(name, seed, final={"upper_loss": 1.0, **ends})
            result.save(tmp_path / name / f"seed-{seed}")
    page = Read(tmp_path)
    drawn = bars_of(page)["accuracy-group"]
    assert drawn["labels"] == ["group 0", "group 1"]
    np.testing.assert_allclose(drawn["series"]["two"], [0.6, 0.1])
    assert "conv3 \u2192 one" in page.texts and "conv3 \u2192 two" in page.texts


def test_tables_are_escaped_for_latex_and_csv():
    grid = Grid("a_b & 5 %", ("x_1", 'a "b"'), [("50%", "1,5 \u00b1 2"), ("\\", "{}")])
    latex = grid.as_latex()
    assert r"\caption{a\_b \& 5 \%}" in latex
    assert r"50\% & 1,5 $\pm$ 2 \\" in latex
    assert r"\textbackslash{} & \{\} \\" in latex
    expected = ['x_1,"a ""b"""', '50%,"1,5 \u00b1 2"', "\\,{}"]
    assert grid.as_csv().splitlines() == expected


def read_back(text: str, command: str) -> tuple[Experiment, dict[str, Any]]:
    """Return what the command line makes of a command."""
    program, name, *words = shlex.split(text)
    assert (program, name) == ("fedbilevel", command)
    known = typer.main.get_command(app)
    given = getattr(known, "commands", {})[command].make_context(command, words).params
    renamed = {**given, "patience": given.get("stop_patience", given.get("patience"))}
    names = [one for one in EXPERIMENT.arguments if one in renamed]
    mine = {one: renamed[one] for one in names}
    if command == "federate":
        assert given["patience"] == 600.0
    return EXPERIMENT.read(**mine), given


FULL = Experiment(
    "a task",
    "fedbio",
    clients=4,
    rounds=7,
    seed=3,
    patience=5,
    max_seconds=1.5,
    noise=0.5,
    clip=1.0,
    compress="topk:0.1",
    weights=(1.0, 2.5),
    options={"data": "my file.csv", "theta": "0.1"},
)


@pytest.mark.parametrize("experiment", [FULL, Experiment("quadratic")])
def test_the_command_repeats_the_run(experiment):
    text = run_command(asdict(experiment), "simulator")
    assert read_back(text, "run")[0] == experiment


def test_the_command_of_a_federation_keeps_both_kinds_of_patience():
    text = run_command(asdict(FULL), "flower")
    assert read_back(text, "federate")[0] == FULL


def test_a_node_of_a_trial_is_given_the_settings_of_its_server(tmp_path):
    made = replace(FULL, task="reweighting", seed=5, precision="float64")
    made = replace(made, measure_every=3, max_bytes=9)
    link = SuperLink("127.0.0.1:1", tmp_path, certificates=None)
    words = serving.persistent_node(made, 2, tmp_path, link).command
    text = shlex.join(["fedbilevel", *words[words.index("node") :]])
    found, given = read_back(text, "node")
    assert shared_settings(found) == shared_settings(made)
    assert found.options == made.options and found.rounds is None
    assert (given["client"], given["trial"]) == (2, True)


def test_the_command_has_the_flags_that_a_person_would_type():
    chosen = {
        "data": "a b.csv",
        "label": "ill",
        "ignore": "x,y",
        "label_kind": "classes",
    }
    typed = run_command(
        asdict(Experiment("regularization", options=chosen)), "simulator"
    )
    assert typed == (
        "fedbilevel run regularization --data 'a b.csv' --label ill --ignore x,y "
        "--label-kind classes"
    )


def test_the_command_repeats_a_comparison():
    options = {"fedbio.lr_x": "2", "lr_y": "1,2"}
    experiment = Experiment("quadratic", rounds=3, options=options)
    tuning = asdict(Tuning(rungs=3, seeds=5))
    settings = {"experiment": asdict(experiment), "seeds": 5, "tuning": tuning}
    text = comparison_command(settings, ["fedbio", "fedavg"])
    found, given = read_back(text, "compare")
    assert found == experiment
    assert (given["seeds"], given["names"]) == (5, "fedbio,fedavg")
    assert given["tune"] and "trials" not in text
    assert (given["rungs"], given["tuning_seeds"], given["trials"]) == (3, 5, 20)


def unfinished(folder: Path) -> dict[str, np.ndarray]:
    columns = {"round": np.asarray([1, 2]), "upper_loss": np.asarray([3.0, 2.5])}
    seconds = {"compile": 1.0, "run": 4.0}
    state = {"x": jnp.zeros(2)}
    checkpoint.save(folder, checkpoint.Snapshot(state, columns, 2, seconds), "mark")
    Experiment("numbers", "one", rounds=9).save(folder)
    return columns


def test_an_unfinished_run_shows_what_its_checkpoint_has(tmp_path):
    columns = unfinished(tmp_path)
    page = Read(tmp_path)
    (run,) = page.data["curves"]["runs"]
    for name, column in columns.items():
        assert_same(run["columns"][name], column)
    assert list(page.data["curves"]["axes"]) == ["rounds", "seconds"]
    assert "Not finished: its checkpoint was written after round 2." in page.text
    assert "It took 4 seconds, after 1 seconds of compiling." in page.text


def test_runs_are_found_below_a_folder_and_links_are_not_followed(tmp_path):
    elsewhere = save_run(tmp_path / "elsewhere", made_up("one"))
    runs = tmp_path / "runs"
    save_run(runs / "b", made_up("one"))
    save_run(runs / "deep" / "a", made_up("one"))
    save_comparison(runs / "c", {"one": 1})
    (runs / "link").symlink_to(elsewhere)
    (runs / "empty").mkdir()
    assert list(find_saved(runs)) == ["b", "c", "deep/a"]
    assert list(find_saved(runs / "b")) == ["b"]


def break_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "result.json").write_text(text)


def break_columns(**columns: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: write_arrays(folder / "columns.npz", columns)


def break_quality(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "quality.json").write_text(text)


def bomb(folder: Path, name: str = "point.npz") -> None:
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("x.npy", "w") as entry:
            for _ in range(260):
                entry.write(bytes(2**20))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (break_text("{"), "result.json is damaged"),
        (break_text("[]"), "result.json is damaged"),
        (break_text('{"task": 1}'), "result.json is damaged"),
        (break_columns(round=np.arange(3)), "columns.npz is damaged"),
        (break_columns(round=np.arange(3), a=np.arange(2)), "columns.npz is damaged"),
        (break_columns(round=np.ones((1, 1)), a=np.ones((1, 1))), "is damaged"),
        (break_columns(round=np.arange(1), a=np.asarray(["b"])), "is damaged"),
        (break_columns(round=np.ones(0), a=np.ones(0)), "no round was measured"),
        (lambda folder: (folder / "columns.npz").write_text("x"), "is damaged"),
        (lambda folder: (folder / "suspicious.csv").write_text("a\n1\n"), "suspicious"),
        (break_quality("{"), "quality.json is damaged"),
        (break_quality('{"sentence": "a"}'), "quality.json is damaged"),
        (break_quality(json.dumps(made_up_quality(metric="b"))), "quality.json is dam"),
        (break_quality(json.dumps({**QUALITY, "rows": "b"})), "quality.json is dam"),
        (bomb, "point.npz unpacks to more than"),
        (lambda folder: bomb(folder, "last_point.npz"), "last_point.npz unpacks to"),
    ],
)
def test_damaged_folders_are_refused_by_name(tmp_path, damage, told):
    save_run(tmp_path, made_up("one"))
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        read_saved(tmp_path)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        read_saved(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_saved(tmp_path / "nothing")


def test_report_writes_a_file_and_spares_others(tmp_path):
    save_run(tmp_path / "run", made_up("one"))
    invoke = CliRunner().invoke
    for arguments in ([], ["--out", str(tmp_path / "my.html")]):
        for _ in range(2):  # a report may be written again
            done = invoke(app, ["report", str(tmp_path / "run"), *arguments])
            assert done.exit_code == 0, done.output
    written = (tmp_path / "run" / "report.html").read_bytes()
    assert written == (tmp_path / "my.html").read_bytes()
    result = tmp_path / "run" / "result.json"
    before = result.read_bytes()
    done = invoke(app, ["report", str(tmp_path / "run"), "--out", str(result)])
    assert done.exit_code == 2 and "is no report" in done.output
    assert result.read_bytes() == before


@pytest.mark.parametrize(
    ("module", "made", "told_as"),
    [
        ("plotly.offline", document._plotly, "reports are drawn by Plotly"),
        ("jinja2", document._templates, "pages are written by Jinja2"),
    ],
)
def test_without_a_package_a_run_is_kept_and_a_sentence_says_why(
    module, made, told_as, tmp_path, monkeypatch, capsys
):
    save_run(tmp_path, made_up("one"))
    made.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    write_report(tmp_path)
    told = capsys.readouterr().err.replace("\n", " ")
    assert f"No report.html: {told_as}" in told
    assert "fedbilevel[report]" in told
    assert not (tmp_path / "report.html").exists()


def test_plotly_and_jinja_are_imported_only_where_a_page_is_written():
    for path in ROOT.rglob("*.py"):
        assert not {"plotly", "jinja2"} & third_parties(path, at_once=True), path
