"""What a server leaves: a model, whose names came by no wire, and tracked rounds."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import Result, tasks
from fedbilevel.cli.app import app
from fedbilevel.datasets import Preparation
from fedbilevel.deployment import serving
from fedbilevel.deployment.apps import Served
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.served_model import blank_task, leave_of_trial
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.models import Dense, Model
from fedbilevel.tasks._base import option_defaults
from fedbilevel.tracking import from_anywhere, tracker
from tests.federation import Loopback
from tests.reports import made_up

TERMS = Terms(patience=1, deadline=5.0)
PLACES = ("north", "south", "west")
COLORS = ("blue", "green", "red")
HEADER = ["hospital", "age", "color", "ill"]


def ignore(*_) -> None:
    """Do nothing with what is told."""


def people(count: int, seed: int = 0) -> list[list[Any]]:
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        age, color = round(draw.normal(50, 12), 1), COLORS[draw.integers(3)]
        ill = (age - 50) / 12 + (2 if color == "red" else -1) > 0
        rows.append([PLACES[number % 3], age, color, "yes" if ill else "no"])
    return rows


def write(path: Path, rows: list[list[Any]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    return str(path)


def command(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def by_hand(point: dict[str, np.ndarray], rows: list, of: list) -> np.ndarray:
    """Return the probabilities of rows by the columns of others, in NumPy alone."""
    ages = np.asarray([row[1] for row in of])
    features = np.asarray(
        [
            [(row[1] - ages.mean()) / ages.std(), *(row[2] == c for c in COLORS)]
            for row in rows
        ],
        float,
    )
    whole = np.hstack([features / 2, np.ones((len(rows), 1))])  # sqrt of 4 features
    # The last model was trained on all rows, and scores the second class.
    scores = whole @ point["y"][-1].T.astype(float)
    chances = np.exp(np.hstack([np.zeros_like(scores), scores]))
    return chances / chances.sum(axis=1, keepdims=True)


def check_predictions(folder: Path, tmp_path: Path, of: list) -> None:
    """Predict a table that nobody has seen, and compare."""
    rows = people(20, seed=9)
    out = tmp_path / "predictions.csv"
    path = write(tmp_path / "new.csv", rows)
    done = command("predict", folder, path, "--out", out)
    assert done.exit_code == 0, done.output
    expected = by_hand(Result.load(folder).point, rows, of)
    with out.open() as file:
        header, *lines = list(csv.reader(file))
    chance = [f"probability of {name}" for name in ("no", "yes")]
    assert header == ["line", "predicted", *chance, "unseen"]
    found = np.asarray([[float(value) for value in line[2:4]] for line in lines])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    named = [("no", "yes")[place] for place in expected.argmax(axis=1)]
    assert [line[1] for line in lines] == named and len(set(named)) == 2
    exported = tmp_path / "model.npz"
    done = command("export", folder, "--to", "npz", "--out", exported)
    assert done.exit_code == 0, done.output
    with np.load(exported) as arrays:
        names = ["age", *(f"color={color}" for color in COLORS)]
        assert list(arrays["feature_names"]) == names
        assert list(arrays["classes"]) == ["no", "yes"]


SETTINGS = Experiment("regularization", "fedavg", 3, rounds=2, local_steps=3, batch=8)
ROWS = people(90)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[list[str], str]:
    """Return the tables of three sites, and the preparation that they agreed on."""
    home = tmp_path_factory.mktemp("sites")
    tables, sums = [], []
    for place in PLACES:
        own = [row for row in ROWS if row[0] == place]
        tables.append(write(home / f"{place}.csv", own))
        sums.append(home / f"{place}.json")
        done = command("prepare", tables[-1], "--label", "ill", "--sums", sums[-1])
        assert done.exit_code == 0, done.output
    out = home / "preparation.json"
    done = command("prepare", *sums, "--out", out)
    assert done.exit_code == 0, done.output
    return tables, str(out)


def preparation_of(path: str) -> Preparation:
    return Preparation.from_json(Path(path).read_text())


def net_of(tables: list[str], settings: Experiment = SETTINGS, **more: str) -> Loopback:
    sites = {}
    for client, data in enumerate(tables):
        options = {**settings.options, "data": data, "label": "ill", **more}
        own = replace(settings, rounds=None, options=options)
        sites[client] = build_site(own, client)
    return Loopback(sites)


@pytest.mark.slow
def test_a_server_that_knows_the_preparation_leaves_a_model(prepared, tmp_path):
    tables, file = prepared
    net, made = net_of(tables, preparation=file), preparation_of(file)
    folder = tmp_path / "run"
    result = serve(net, SETTINGS, folder, TERMS, report=ignore, preparation=made)
    assert result.model is not None
    check_predictions(folder, tmp_path, ROWS)
    # What columns and classes are called came from the file, and from no site.
    answers = b"".join(answer or b"" for _, _, answer in net.sent)
    assert b"color" not in answers and b"blue" not in answers


@pytest.mark.slow
def test_without_it_the_folder_says_what_to_do(prepared, tmp_path):
    tables, file = prepared
    folder = tmp_path / "run"
    serve(net_of(tables, preparation=file), SETTINGS, folder, TERMS, report=ignore)
    with pytest.raises(CheckpointError, match="Serve with --preparation FILE"):
        Model.load(folder)


def test_another_preparation_than_the_sites_have_is_refused(prepared, tmp_path):
    """By its fingerprint, before anything is computed."""
    tables, file = prepared
    text = Path(file).read_text()
    other = json.loads(text)
    other["columns"][0]["center"] += 1e-9
    changed = Preparation.from_json(json.dumps(other))
    cases = [(net_of(tables, preparation=file), changed, "by another file")]
    shared = [write(tmp_path / f"{k}.csv", ROWS[:60]) for k in range(3)]
    # Sites with the same columns and classes that scale by their own rows.
    cases.append((net_of(shared), preparation_of(file), "each by its own rows"))
    for number, (net, made, told) in enumerate(cases):
        folder = tmp_path / f"run{number}"
        with pytest.raises(InvalidInputError, match=told):
            serve(net, SETTINGS, folder, TERMS, report=ignore, preparation=made)
        assert not (folder / "result.json").exists()


def test_a_task_without_columns_takes_no_preparation(prepared):
    made = preparation_of(prepared[1])
    for name in ("quadratic", "few-shot"):
        with pytest.raises(InvalidInputError, match=f"'{name}' makes no model"):
            blank_task(Experiment(name, clients=2), made)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cleaning", {"model": "mlp", "width": "5"}),
        ("representation", {"width": "6"}),
        ("loss-tuning", {"model": "mlp", "width": "7", "imbalance": "3"}),
        ("fairness", {}),
    ],
)
def test_made_up_rows_have_the_layers_of_true_ones(name, options, prepared, tmp_path):
    """Shapes by the preparation alone are those of a task that has the rows."""
    file = prepared[1]
    table = write(tmp_path / "all.csv", ROWS)
    rows = {"data": table, "preparation": file, "group": "hospital:west"}
    rows |= {"split": "4", "rows": "80", "train": "0.5", "partition": "dirichlet:9"}
    known = option_defaults(tasks.find(name))
    chosen = {n: v for n, v in {**rows, **options}.items() if n in known}
    own = Experiment(name, clients=2, options=chosen)
    true, _, _ = own.build_task()
    blank = blank_task(own, preparation_of(file))
    assert true.predictor is not None and blank.predictor is not None
    pairs = zip(
        true.predictor.layers(true.x, true.y),
        blank.predictor.layers(blank.x, blank.y),
        strict=True,
    )
    for mine, theirs in pairs:
        assert type(mine) is type(theirs)
        assert vars(mine).keys() == vars(theirs).keys()
        for one, other in zip(vars(mine).values(), vars(theirs).values(), strict=True):
            assert np.shape(one) == np.shape(other)
    assert blank.preparation == true.preparation


@pytest.mark.slow
def test_private_x_stays_and_the_classifier_is_left(prepared, tmp_path):
    """The weights of rows never come to the server; the model needs none of them."""
    tables, file = prepared
    settings = replace(SETTINGS, task="cleaning", algorithm="fedbio")
    net, made = net_of(tables, settings, preparation=file), preparation_of(file)
    folder = tmp_path / "run"
    result = serve(net, settings, folder, TERMS, report=ignore, preparation=made)
    assert "x" not in result.point and result.levels is None
    weight, bias = (result.point[f"y.head.{name}"] for name in ("weight", "bias"))
    columns = {"age": np.asarray([61.5]), "color": np.asarray(["red"])}
    ages = np.asarray([row[1] for row in ROWS])
    features = np.asarray([(61.5 - ages.mean()) / ages.std(), 0, 0, 1]) / 2
    chances = np.exp(weight.astype(float) @ features + bias)
    found = Model.load(folder).probabilities(columns)
    np.testing.assert_allclose(found[0], chances / chances.sum(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_sites_with_a_y_of_their_own_leave_no_model(prepared, tmp_path):
    tables, file = prepared
    settings = replace(SETTINGS, algorithm="fedbio-clientwise")
    net, made = net_of(tables, settings, preparation=file), preparation_of(file)
    with pytest.raises(InvalidInputError, match="every site keeps a y of its own"):
        serve(net, settings, tmp_path / "run", TERMS, report=ignore, preparation=made)


def test_a_trial_whose_y_stayed_at_the_nodes_leaves_no_model(tmp_path):
    """The start is not what was learned."""
    table = write(tmp_path / "people.csv", ROWS)
    options = {"data": table, "label": "ill", "site": "hospital"}
    experiment = replace(SETTINGS, options=options)
    x = {"x.common": np.zeros(()), "x.own": np.zeros(2)}
    whole = {**x, "y": np.ones((6, 1, 5))}
    result = made_up("fedavg", task="regularization", point=whole)
    model = leave_of_trial(experiment, result, tmp_path)
    assert model is not None and isinstance(model.layers[-1], Dense)
    np.testing.assert_array_equal(model.layers[-1].weight, [[0] * 4, [1] * 4])
    kept = replace(result, point=x)
    assert leave_of_trial(experiment, kept, tmp_path) is None


@pytest.mark.slow
def test_a_server_writes_every_measured_round_and_may_be_stopped(prepared, tmp_path):
    tables, made = prepared
    settings = replace(SETTINGS, rounds=7, measure_every=2)
    file = tmp_path / "rounds.jsonl"
    told: Any = {"report": ignore}
    seen = []
    with tracker(f"jsonl:{file}", resume=True) as track:
        net = net_of(tables, preparation=made)
        result = serve(net, settings, tmp_path / "a", TERMS, on_round=track, **told)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["round"] for line in lines] == [2, 4, 6, 7]
    losses = [line["upper_loss"] for line in lines]
    np.testing.assert_allclose(losses, result.columns["upper_loss"], rtol=1e-6)

    def stop(event) -> None:
        seen.append(event.round)
        event.stop("enough")

    net = net_of(tables, preparation=made)
    ended = serve(net, settings, tmp_path / "b", TERMS, on_round=stop, **told)
    assert seen[0] == 2 and ended.final["round"] < 7 and "enough" in ended.ended


def test_a_place_to_track_is_asked_for_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.jsonl").write_text("mine")
    words = ("quadratic", "--clients", 2, "--track", "jsonl:kept.jsonl")
    done = command("federate", *words)
    assert done.exit_code == 2 and "kept.jsonl exists" in done.stderr
    done = command("serve", *words, "--insecure", "--out", tmp_path / "run")
    assert done.exit_code == 2 and "kept.jsonl exists" in done.stderr
    assert (tmp_path / "kept.jsonl").read_text() == "mine"
    assert not (tmp_path / "run").exists()
    # The server is a process in a folder of its own.
    assert from_anywhere("jsonl:a/b.jsonl") == f"jsonl:{tmp_path.resolve()}/a/b.jsonl"


@pytest.mark.slow
def test_a_trial_leaves_the_model_of_a_simulation(tmp_path):
    table = write(tmp_path / "people.csv", ROWS)
    options = {"data": table, "label": "ill", "site": "hospital"}
    # A plain step: one that is measured in single precision is another one.
    options["lower_step"] = "0.5"
    experiment = replace(SETTINGS, options=options)
    folder = tmp_path / "run"
    folder.mkdir()
    terms = Terms(deadline=60.0, patience=300.0)
    track = f"jsonl:{tmp_path / 'rounds.jsonl'}"
    served = Served(experiment, folder, terms, track=track)
    serving.federate(served, nodes="persistent", watch=ignore)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    check_predictions(folder, tmp_path, ROWS)
    simulated = experiment.run(tmp_path / "simulated").model
    assert simulated is not None
    served = Model.load(folder)
    assert served.preparation == simulated.preparation
    assert served.classes == simulated.classes
    ours, theirs = (one.layers[-1] for one in (served, simulated))
    assert isinstance(ours, Dense) and isinstance(theirs, Dense)
    np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-4, atol=1e-5)
