"""Tables of one's own: named columns, sites, groups, gaps, and what is said of them."""

import csv
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbilevel import datasets, tasks
from fedbilevel.cli.app import app
from fedbilevel.datasets import Preparation, Sums, TableChoices
from fedbilevel.datasets.preparation import CategoryColumn, NumericColumn
from fedbilevel.errors import FedbilevelError, InvalidInputError, NonFiniteError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import shared_settings
from fedbilevel.experiments.sites import build_site
from fedbilevel.tasks._base import options_of
from fedbilevel.tasks._labeled import cross_entropies, improbabilities
from fedbilevel.tasks.cleaning import suspicious_rows
from tests.cases import some_of

COLOURS = ("blue", "green", "red")
PLACES = ("North", "South", "West")
ROWS = 90


def fails(message):
    return pytest.raises(InvalidInputError, match=message)


def make(name: str, *sizes: Any, **options: Any) -> Any:
    return tasks.find(name)(*sizes, **options)


def hospital_rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Return rows whose label is fully determined by the colour."""
    draw = np.random.default_rng(0)
    colour = draw.integers(0, 3, count)
    return [
        {
            "age": round(float(draw.normal(50, 10)), 2),
            "colour": COLOURS[colour[row]],
            "place": PLACES[row % 3],
            "sick": "yes" if colour[row] == 2 else "no",
        }
        for row in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def table(tmp_path) -> str:
    return write(tmp_path / "mine.csv", hospital_rows())


def choices(**given: str) -> TableChoices:
    return TableChoices(**given)


# Text columns, defect 1


@pytest.mark.slow
def test_text_columns_are_learned_from(table):
    experiment = Experiment(
        "regularization",
        "fedavg",
        rounds=30,
        options={"data": table, "site": "place"},
    )
    result = experiment.run()
    assert result.final["test_accuracy"] == 1
    about = result.config["data"]
    assert about["encoded"] == {"colour": list(COLOURS)}
    assert about["left_out"] == {"place": "says the site"}
    assert [site["name"] for site in about["sites"]] == list(PLACES)
    json.dumps(about)


def test_features_are_scaled_numbers_and_zeros_and_ones(table):
    rows = hospital_rows()
    task = make("regularization", data=table, site="place")
    ages = np.asarray([row["age"] for row in rows])
    made = task.preparation
    assert made.feature_names == ("age", *(f"colour={name}" for name in COLOURS))
    columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    expected = np.column_stack(
        [(ages - ages.mean()) / ages.std()]
        + [(columns["colour"] == name).astype(float) for name in COLOURS]
    )
    np.testing.assert_allclose(made.apply(columns), expected)
    # The rows of the task are those of the file, divided by the root of their width.
    for client, places in enumerate(task.origin.places):
        found = np.asarray(task.data.lower["features"])[client, : len(places), :-1]
        np.testing.assert_allclose(found, expected[places - 2] / 2)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("when", [f"2020-01-{n % 28 + 1:02d}" for n in range(ROWS)], "holds dates"),
        ("when", [f"{n % 28 + 1}.1.20" for n in range(ROWS)], "holds dates"),
        ("who", [f"p{n}" for n in range(ROWS)], "looks like an id or a name"),
        ("who", [f"p{n // 1.5:.0f}" for n in range(ROWS)], "has 60 different texts"),
        ("number", list(range(ROWS)), "counts the rows, so it looks like an id"),
        ("number", list(range(ROWS, 0, -1)), "counts the rows"),
        ("text", ["word " * 50] * ROWS, "more than 200 characters"),
    ],
)
def test_dates_ids_and_prose_are_named_and_refused(tmp_path, column, values, message):
    rows = [
        {column: value, **row}
        for value, row in zip(values, hospital_rows(), strict=True)
    ]
    path = write(tmp_path / "t.csv", rows)
    with fails(f"column '{column}' .*{message}.*--ignore {column}"):
        datasets.load(path)
    left = datasets.load(path, choices=choices(ignore=column)).notes["left_out"]
    assert left == {column: "ignored"}


@pytest.mark.parametrize("count", [12, 30, 50])
def test_a_text_that_never_repeats_is_an_id_however_few_there_are(tmp_path, count):
    every = hospital_rows(count)

    def load(who: list[str]) -> Any:
        rows = [{"who": one, **row} for one, row in zip(who, every, strict=True)]
        return datasets.load(write(tmp_path / "t.csv", rows), choices=choices())

    names = [f"patient {n}" for n in range(count)]
    told = "column 'who' has another text in every row, so it looks like an id"
    with fails(f"{told}.*--ignore who"):
        load(names)
    with fails(told):
        load(["", "", *names[2:]])  # gaps do not hide it
    assert len(load([names[1], *names[1:]]).notes["encoded"]["who"]) == count - 1


def test_all_useless_columns_are_named_at_once(tmp_path):
    rows = [
        {"id": n, "day": "2020-01-02", **row} for n, row in enumerate(hospital_rows())
    ]
    with fails("--ignore id,day, or make them"):
        datasets.load(write(tmp_path / "t.csv", rows))


# Cleaning, defect 2


def test_own_labels_are_not_corrupted(table):
    task = make("cleaning", data=table, site="place", train=0.5)
    rows = hospital_rows()
    for client, places in enumerate(task.origin.places):
        label = np.asarray(task.data.lower["label"])[client, : len(places)]
        told = [task.classes[code] for code in label]
        assert told == [rows[place - 2]["sick"] for place in places]
        assert {rows[place - 2]["place"] for place in places} == {PLACES[client]}
    assert not np.any(task.data.lower["corrupted"])
    assert task.origin.summary["remarks"] == []
    asked = make("cleaning", data=table, corrupted=0.25)
    assert "25% of the training labels" in asked.origin.summary["remarks"][0]
    built_in = make("cleaning", 2, rows=40)
    assert "50% of the training labels" in built_in.origin.summary["remarks"][0]


def test_own_labels_are_not_trusted_to_judge_unless_it_is_said(table):
    kinds = [
        make("cleaning", **options).problem.upper.losses
        for options in ({"data": table}, {"data": table, "trusted": "true"}, {})
    ]
    assert kinds == [improbabilities, cross_entropies, cross_entropies]


def test_suspicious_rows_are_those_of_small_weights(table):
    task = make("cleaning", data=table, site="place")
    x = np.asarray(np.random.default_rng(1).normal(size=task.data.lower["label"].shape))
    listed = suspicious_rows(task, {"x": x})
    assert listed.header == ("file", "line", "site", "weight", "label")
    assert len(listed.rows) == int(task.data.lower_sizes.sum())
    weights = [row[3] for row in listed.rows]
    assert weights == sorted(weights)
    rows = hospital_rows()
    for file, line, site, weight, label in listed.rows:
        assert (file, site) == (table, rows[line - 2]["place"])
        assert label == rows[line - 2]["sick"]
        client = PLACES.index(site)
        place = list(task.origin.places[client]).index(line)
        assert weight == pytest.approx(1 / (1 + np.exp(-x[client, place])))


def test_rows_of_judges_that_err_are_listed_by_the_chance_to_be_right(table):
    task = make("cleaning", data=table, site="place")
    x, draw = np.zeros(task.data.lower["label"].shape), np.random.default_rng(0)
    weight = draw.normal(size=task.y.head.weight.shape)
    point = {"x": x, "y.head.weight": weight, "y.head.bias": np.zeros(2)}
    listed = suspicious_rows(task, point)
    assert listed.header == ("file", "line", "site", "weight", "label", "right")
    chances = [row[5] for row in listed.rows]
    assert chances == sorted(chances) and len(set(chances)) > 10
    # Of one label, rows are in the order of its probability: rates are alike.
    seen = {label: [] for label in task.classes}
    for _, line, site, _, label, _ in listed.rows:
        client = PLACES.index(site)
        place = list(task.origin.places[client]).index(line)
        row = np.asarray(task.data.lower["features"])[client, place]
        scores = weight @ row / len(row) ** 0.5
        seen[label].append(scores[task.classes.index(label)] - scores.mean())
    assert all(found == sorted(found) for found in seen.values())
    trusting = make("cleaning", data=table, site="place", trusted="true")
    assert suspicious_rows(trusting, point).header[-1] == "label"


@pytest.mark.slow
def test_a_run_leaves_its_suspicious_rows(table, tmp_path):
    options = {"data": table, "site": "place"}
    Experiment("cleaning", "fedbio", rounds=2, options=options).run(tmp_path / "run")
    with (tmp_path / "run" / "suspicious.csv").open() as file:
        found = list(csv.DictReader(file))
    rows = hospital_rows()
    assert len(found) == 54
    assert all(rows[int(row["line"]) - 2]["sick"] == row["label"] for row in found)


# Clients, classes, labels, sites: defects 5, 6, 10, 11, 15


@pytest.mark.parametrize("options", [{"site": "place"}, {"partition": "column:place"}])
def test_another_number_of_clients_than_sites_is_refused(table, options):
    with fails("--clients 5: column 'place' of mine has 3 values, North, South, West"):
        make("regularization", 5, data=table, **options)
    assert make("regularization", 3, data=table, **options).data.clients == 3
    with fails("site=place and partition=shards:2 both set the partition"):
        make("regularization", data=table, site="place", partition="shards:2")


def test_a_site_without_rows_left_is_named(tmp_path):
    rows = hospital_rows()
    for row in range(ROWS):
        order = np.random.default_rng(0).permutation(ROWS)
        rows[row]["place"] = "Tiny" if row == order[0] else "Big"
    with fails("'Tiny' of column 'place' has too few rows"):
        make("regularization", data=write(tmp_path / "t.csv", rows), site="place")


@pytest.mark.parametrize("name", ["regularization", "cleaning", "representation"])
def test_a_table_of_one_class_is_refused(tmp_path, name):
    rows = [{**row, "sick": "yes"} for row in hospital_rows()]
    with fails("all 90 rows have the label 'yes', so there is nothing to classify"):
        make(name, data=write(tmp_path / "t.csv", rows))


def test_any_column_can_be_the_label(table):
    task = make("regularization", data=table, label="colour", ignore="place")
    assert task.classes == COLOURS
    assert task.preparation.label.name == "colour"
    assert "sick=yes" in task.preparation.feature_names
    with fails("unknown column of .*mine.csv 'color'. Did you mean 'colour'"):
        make("regularization", data=table, label="color")
    with fails("cannot be the label and the site"):
        make("regularization", data=table, site="sick")


def test_a_numeric_site_column_of_any_name_makes_clients(tmp_path):
    rows = [{**row, "place": 8 + n % 3} for n, row in enumerate(hospital_rows())]
    path = write(tmp_path / "t.csv", rows)
    task = make("regularization", data=path, site="place")
    assert task.names == ("8", "9", "10")
    assert "place" not in task.preparation.feature_names
    assert "place" in make("regularization", data=path).preparation.feature_names


@pytest.mark.slow
def test_tables_and_errors_have_the_names_of_sites(table, tmp_path):
    words = ["label-counts", "regularization", "--data", table, "--site", "place"]
    shown = CliRunner().invoke(app, words).stdout
    assert all(name in shown for name in PLACES)
    options = {"data": table, "site": "place", "lower_step": "1e30"}
    diverging = Experiment(
        "regularization",
        "fedavg",
        rounds=30,
        precision="float32",
        options=options,
        safeguard=False,
    )
    with pytest.raises(NonFiniteError, match="North|South|West"):
        diverging.run()
    rows = hospital_rows(12) + [{**hospital_rows(1)[0], "place": "Lone"}]
    order = np.random.default_rng(0).permutation(13)
    rows[order[-1]], rows[12] = rows[12], rows[order[-1]]
    with fails("'Lone' of 4 would get too few rows"):
        path = write(tmp_path / "t.csv", rows)
        make("regularization", data=path, site="place", folds=1)


# Theory on a table, defect 32


class BuiltError(Exception):
    """A task was built: `args` has it."""


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("check-theory --site place", PLACES),
        ("check-theory --clients 2 --ignore place", ()),
        ("plan --target 1 --ignore place", ()),
        *some_of(
            [
                ("plan --preset theory --target 1 --ignore place", ()),
                ("speedup --clients 1,2 --ignore place", ()),
                ("complexity --clients 1,2 --ignore place", ()),
            ],
            0,
        ),
    ],
)
def test_theory_is_told_of_own_tables(table, monkeypatch, words, names):
    def stop(_: Experiment, task: Any, values: Any) -> Any:
        raise BuiltError(task, values)

    monkeypatch.setattr("fedbilevel.runtime.configure", lambda *_, **__: None)
    monkeypatch.setattr(Experiment, "bind", stop)
    command, *more = words.split()
    chosen = ["--data", table, "--label", "colour", *more]
    raised = CliRunner().invoke(app, [command, "regularization", *chosen]).exception
    assert isinstance(raised, BuiltError)
    task, values = raised.args
    assert values["data"] == table and task.names == names
    assert task.classes == COLOURS
    assert task.preparation.feature_names == ("age", "sick=no", "sick=yes")
    assert int(task.data.lower_sizes.sum()) == 72  # four fifths of its 90 rows


# Shares and meanings, defect 12


def test_own_data_train_on_most_of_the_rows(table):
    for name in ("regularization", "cleaning", "representation", "loss-tuning"):
        task = make(name, 2, data=table)
        # Where rows take turns, all of them train and validate.
        trained, judged = (72, 72) if name == "regularization" else (54, 18)
        assert int(task.data.lower_sizes.sum()) == trained, name
        assert int(task.data.upper_sizes.sum()) == judged, name
    built_in = make("regularization", 2)
    assert int(built_in.data.lower_sizes.sum()) == int(0.2 * 1797)


@pytest.mark.parametrize("name", tasks.names())
def test_every_option_of_a_task_has_a_meaning(name):
    for option, (_, meaning) in options_of(tasks.find(name)).items():
        assert len(meaning.split()) >= 3, option


# Images, defect 13


def draw_images(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 9), 20 * number).save(folder / name)
    return folder


def test_class_folders_with_and_without_sites_above(tmp_path):
    names = [f"{kind}/{n}.jpg" for kind in ("cat", "dog") for n in range(3)]
    plain = datasets.load(str(draw_images(tmp_path / "plain", names)))
    assert plain.classes == ("cat", "dog")
    assert list(plain.label) == [0, 0, 0, 1, 1, 1]
    assert plain.notes == {"layout": "class/image"}
    above = [f"{site}/{name}" for site in "AB" for name in names]
    above = [name.replace(".jpg", ".png") for name in above]
    sites = datasets.load(str(draw_images(tmp_path / "sites", above)))
    assert sites.classes == ("cat", "dog")
    assert list(sites.columns["site"]) == ["A"] * 6 + ["B"] * 6
    assert sites.notes == {"layout": "site/class/image"}
    draw_images(tmp_path / "plain", ["other/cat/1.png"])
    with fails("folders of different depth"):
        datasets.load(str(tmp_path / "plain"))
    draw_images(tmp_path / "sites", ["A/deep/cat/1.png"])
    with fails("three folders deep"):
        datasets.load(str(tmp_path / "sites"))


# Parquet, Excel, frames, gaps, numbers: defect 14


def with_gaps() -> list[dict[str, Any]]:
    rows = hospital_rows()
    return [{**row, "age": None if n in (4, 40) else row["age"]}
            for n, row in enumerate(rows)]  # fmt: skip


class Frame:
    """What pandas and polars have in common."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows, self.columns = rows, list(rows[0])

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray([row[name] for row in self.rows], object)


def as_file(kind: str, rows: list[dict[str, Any]], path: Path) -> str:
    if kind == "csv":
        return write(path.with_suffix(".csv"), rows)
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
        return str(path.with_suffix(".parquet"))
    book = pytest.importorskip("openpyxl").Workbook()
    for row in [list(rows[0]), *(list(row.values()) for row in rows)]:
        book.active.append(row)
    book.save(path.with_suffix(".xlsx"))
    return str(path.with_suffix(".xlsx"))


@pytest.mark.parametrize("kind", ["csv", "parquet", "xlsx", "frame"])
def test_all_kinds_of_tables_are_the_same_data(tmp_path, kind):
    rows = with_gaps()
    ages = [row["age"] for row in rows if row["age"] is not None]

    def load(**chosen: str):
        if kind == "frame":
            return datasets.from_frame(Frame(rows), **chosen)
        path = as_file(kind, rows, tmp_path / "t")
        return datasets.load(path, choices=choices(**chosen))

    told = {"csv": "line 6", "parquet": "row 4", "xlsx": "row 6", "frame": "row 4"}
    with fails(f"{told[kind]}, column 'age': the number is missing.*--missing mean"):
        load()
    filled = load(missing="mean")
    assert filled.features[4, 0] == pytest.approx(np.mean(ages))
    np.testing.assert_allclose(np.delete(filled.features[:, 0], [4, 40]), ages)
    assert filled.notes["filled"] == {"age": 2}
    colours = [COLOURS.index(row["colour"]) for row in rows]
    np.testing.assert_array_equal(filled.features[:, 1:4], np.eye(3)[colours])
    dropped = load(missing="drop")
    np.testing.assert_allclose(dropped.features[:, 0], ages)
    assert dropped.notes["dropped_rows"] == 2
    assert dropped.places is not None and dropped.places.shape == (88,)
    assert filled.classes == ("no", "yes")


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    for name, kind in (("pyarrow.parquet", "parquet"), ("openpyxl", "xlsx")):
        path = tmp_path / f"t.{kind}"
        path.write_bytes(b"PAR1")
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(FedbilevelError, match=r"install fedbilevel\[tables\]"):
            datasets.load(str(path))


@pytest.mark.parametrize("kind", ["parquet", "xlsx"])
def test_a_damaged_table_is_told_in_a_printable_sentence(tmp_path, kind):
    pytest.importorskip("pyarrow")
    pytest.importorskip("openpyxl")
    (tmp_path / f"t.{kind}").write_bytes(b"PAR1\0\x01\x02" * 20)
    with fails(f"t.{kind} cannot be read as") as caught:
        datasets.load(str(tmp_path / f"t.{kind}"))
    assert str(caught.value).isprintable()
    (tmp_path / "t.bin").write_bytes(b"PAR1\0\x01\x02\n" * 20)
    with fails("is not LIBSVM text.*.parquet") as caught:
        datasets.load(str(tmp_path / "t.bin"))
    assert str(caught.value).isprintable()


def test_texts_that_repeat_do_not_unpack_to_more_memory(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    long = arrow.array(["x" * 2**20 + " "]).dictionary_encode()
    same = arrow.DictionaryArray.from_arrays(np.zeros(3000, np.int32), long.dictionary)
    path = tmp_path / "bomb.parquet"
    parquet.write_table(arrow.table({"a": same, "label": np.arange(3000)}), path)
    tracemalloc.start()
    try:
        with fails("more than 200 characters"):
            datasets.load(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_number_can_be_predicted(tmp_path):
    draw = np.random.default_rng(3)
    a = draw.normal(size=120)
    rows = [{"a": one, "price": 100 + 7 * one + 0.1 * draw.normal()} for one in a]
    path = write(tmp_path / "t.csv", rows)
    prices = np.asarray([row["price"] for row in rows])
    task = make("regularization", 2, data=path)
    assert task.classes == ()
    assert task.preparation.label.center == pytest.approx(prices.mean())
    experiment = Experiment("regularization", "fedavg", 2, rounds=40,
                            options={"data": path, "lower_step": "1"})  # fmt: skip
    result = experiment.run()
    # Without any model the error would be the deviation of the prices.
    assert result.final["test_root_mean_squared_error"] < 0.2 * prices.std()
    assert result.final["test_explained_variance"] > 0.95
    x, (weight,) = result.point["x.own"], result.point["y"][-1]
    tested = np.random.default_rng(0).permutation(120)[:24]
    features = np.column_stack([(a - a.mean()) / a.std(), np.ones(120)])
    predicted = task.preparation.label.decode(features @ weight)
    error = np.sqrt(np.mean((predicted - prices)[tested] ** 2))
    found = result.final["test_root_mean_squared_error"]
    assert len(x) == 1 and found == pytest.approx(error, rel=1e-4)
    with fails("'price' holds numbers with fractions, and the task cleaning predicts"):
        make("cleaning", data=path)
    with fails("the label of row 0 is"):
        make("regularization", data=path, label_kind="classes")


# Groups and architectures, defect 16


def test_fairness_takes_a_table_with_groups(tmp_path):
    rows = [
        {**row, "sex": "fm"[n % 5 == 0]} for n, row in enumerate(hospital_rows(300))
    ]
    path = write(tmp_path / "t.csv", [dict(sorted(row.items())) for row in rows])
    options = {"data": path, "label": "sick", "group": "sex", "site": "place"}
    task = make("fairness", **options)
    assert task.names == PLACES
    panel = np.asarray(task.data.upper["label"])
    assert panel.shape[:3] == (3, 1, 2) and panel.shape[3] >= 1
    sizes = np.asarray(task.data.lower_sizes)
    judging = np.asarray(task.data.upper["size"]).sum(axis=(1, 2))
    assert int(sizes.sum() + judging.sum()) == 240
    group = np.asarray(task.data.lower["group"])
    for client, places in enumerate(task.origin.places):
        sexes = [dict(rows[place - 2])["sex"] for place in places]
        assert ["fm"[code] for code in group[client, : sizes[client]]] == sexes
    assert "sex=f" not in task.preparation.feature_names
    held = [(site["training"], site["validation"]) for site in
            task.origin.summary["sites"]]  # fmt: skip
    assert held == list(zip(sizes, judging, strict=True))
    assert task.origin.summary["remarks"][:2] == ["group 0 is 'f'", "group 1 is 'm'"]
    against = make("fairness", **{**options, "site": "", "group": "colour:red"})
    assert against.origin.summary["remarks"][1] == "group 1 is 'red'"
    with fails("has 3 values, blue, green, red, .*--group colour:blue"):
        make("fairness", **{**options, "group": "colour"})
    with fails("name their column with --group COLUMN"):
        make("fairness", data=path, label="sick")


def test_architecture_takes_images_and_refuses_tables(tmp_path, table):
    names = [f"{kind}/{n}.png" for kind in ("cat", "dog", "owl") for n in range(8)]
    task = make("architecture", 2, data=str(draw_images(tmp_path / "images", names)))
    assert task.y.last.weight.shape[0] == 3
    assert task.data.lower["image"].shape[2] == 64
    with fails("rows of 4 columns are no images.*Tasks for tables are regularization"):
        make("architecture", data=table, ignore="place")


# Real sites


def test_sites_prepare_alike_from_their_sums(tmp_path):
    rows = with_gaps()
    words = ["--label", "sick", "--ignore", "place", "--missing", "mean"]
    parts = [[row for row in rows if row["place"] == name] for name in PLACES]
    # One site has never seen a red one, and so knows one class alone.
    parts[0] = [row for row in parts[0] if row["colour"] != "red"]
    sums = []
    for name, part in zip(PLACES, parts, strict=True):
        path = write(tmp_path / f"{name}.csv", part)
        sums.append(str(tmp_path / f"{name}.json"))
        done = CliRunner().invoke(app, ["prepare", path, *words, "--sums", sums[-1]])
        assert done.exit_code == 0, done.output
        assert "50." not in Path(sums[-1]).read_text().partition("mean")[0]
    out = str(tmp_path / "preparation.json")
    done = CliRunner().invoke(
        app, ["prepare", *sums, "--missing", "mean", "--out", out]
    )
    assert done.exit_code == 0, done.output
    made = Preparation.from_json(Path(out).read_text())
    kept = [row for part in parts for row in part]
    ages = np.asarray([row["age"] for row in kept if row["age"] is not None])
    age, colour = made.columns
    assert isinstance(age, NumericColumn) and isinstance(colour, CategoryColumn)
    found = [age.center, age.spread, age.fill]
    np.testing.assert_allclose(found, [ages.mean(), ages.std(), ages.mean()])
    assert colour.values == COLOURS and made.label.classes == ("no", "yes")
    # The site without red rows has a feature and a class for them.
    north = str(tmp_path / "North.csv")
    with fails("all .* rows have the label 'no'"):
        make("regularization", 1, data=north, label="sick", missing="mean")
    task = make("regularization", 1, data=north, preparation=out)
    assert task.preparation == made and task.classes == ("no", "yes")
    site = Experiment("regularization", "fedavg", 3, rounds=1, local_steps=1, batch=4,
                      options={"data": north, "preparation": out})  # fmt: skip
    facts = build_site(site, 0).facts
    assert "preparation" not in facts["task"] and "data" not in facts["task"]
    assert shared_settings(site)["options"] == {}


def test_what_a_site_sends_tells_nothing_of_few_rows(tmp_path):
    rows = [{"age": 30.5 + k, "colour": "red", "sick": k % 2} for k in range(12)]
    rows[3]["colour"] = "mauve"
    path, few = write(tmp_path / "a.csv", rows), write(tmp_path / "b.csv", rows[:9])

    def prepare(*words: object):
        return CliRunner().invoke(app, ["prepare", *map(str, words)])

    for option in ("--sums", "--out"):
        done = prepare(few, "--label", "sick", option, tmp_path / "few.json")
        assert done.exit_code == 2 and "9 rows are too few" in done.output
    assert not (tmp_path / "few.json").exists()
    done = prepare(path, "--label", "sick", "--sums", tmp_path / "a.json")
    assert done.exit_code == 0 and "of colour not all is reported" in done.output
    assert "mauve" not in (tmp_path / "a.json").read_text()
    more = ("--minimum-rows", 1, "--sums", tmp_path / "b.json")
    done = prepare(few, "--label", "sick", *more)
    assert done.exit_code == 0 and "not all is reported" not in done.output
    assert "mauve" in (tmp_path / "b.json").read_text()
    assert prepare(few, "--minimum-rows", 0, *more[2:]).exit_code == 2


def test_prepare_overwrites_nothing(table):
    before = Path(table).read_bytes()
    for option in ("--sums", "--out"):
        done = CliRunner().invoke(app, ["prepare", table, option, table])
        assert done.exit_code == 2 and "exists. Choose another file" in done.stderr
    assert Path(table).read_bytes() == before


def test_prepare_says_what_is_wrong(tmp_path, table):
    def told(*words: str) -> str:
        done = CliRunner().invoke(app, ["prepare", *words])
        assert done.exit_code != 0
        return " ".join(done.output.split())

    assert "give --sums FILE" in told(table)
    (tmp_path / "no.json").write_text("{}")
    assert "no.json: this is no file of sums" in told(
        str(tmp_path / "no.json"), "--out", str(tmp_path / "p.json")
    )
    sums = Sums.of({"a": np.ones(10)}, "label", np.ones(10)).to_json()
    (tmp_path / "p.json").write_text(sums)
    with fails("p.json: this is no file of preparation"):
        make("regularization", data=table, preparation=str(tmp_path / "p.json"))


def test_choices_of_columns_are_for_tables(table):
    for name, value in {"label": "a", "missing": "drop", "ignore": "a"}.items():
        with fails(f"{name}={value}: digits is no table with named columns"):
            make("regularization", **{name: value})
    with fails("unknown value of missing 'median'"):
        make("regularization", data=table, missing="median")
    with fails("unknown column of .*mine.csv 'nowhere'"):
        make("regularization", data=table, site="nowhere")
