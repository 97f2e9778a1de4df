"""Frames of the real pandas and polars are the table that a file of them is."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

from fedbilevel import datasets
from fedbilevel.datasets import Dataset, TableChoices
from fedbilevel.errors import InvalidInputError
from fedbilevel.tasks import find

ROWS = 60
CHOSEN = {"label": "sick", "site": "hospital"}


def columns() -> dict[str, list[Any]]:
    """Return text, gaps and three hospitals; None is a gap."""
    draw = np.random.default_rng(3)
    smoker = [("no", "former", "yes")[n] for n in draw.integers(0, 3, ROWS)]
    return {
        "age": [int(n) for n in draw.integers(20, 90, ROWS)],
        "pressure": [
            None if n % 9 == 4 else round(100 + n / 3, 2) for n in range(ROWS)
        ],
        "smoker": [None if n % 11 == 2 else one for n, one in enumerate(smoker)],
        "visits": [None if n == 7 else n % 5 for n in range(ROWS)],
        "hospital": [("north", "south", "west")[n % 3] for n in range(ROWS)],
        "sick": ["yes" if one == "yes" else "no" for one in smoker],
    }


def of_pandas(path: Path) -> Any:
    frame = pandas.DataFrame(columns())
    frame.to_csv(path, index=False)
    return frame


def of_pandas_with_its_own_types(path: Path) -> Any:
    """Nullable whole numbers, categories; rows whose index begins elsewhere."""
    frame = of_pandas(path)
    kinds = {"visits": "Int64", "smoker": "category", "sick": "string"}
    return frame.astype(kinds).set_index(np.arange(100, 100 + ROWS))


def of_polars(path: Path) -> Any:
    frame = polars.DataFrame(columns())
    frame.write_csv(path)
    return frame


def of_polars_with_its_own_types(path: Path) -> Any:
    kinds = {"smoker": polars.Categorical, "hospital": polars.Enum(PLACES)}
    return of_polars(path).cast({**kinds, "age": polars.Int8})


PLACES = ["north", "south", "west"]
KINDS = pytest.mark.parametrize(
    "make",
    [of_pandas, of_pandas_with_its_own_types, of_polars, of_polars_with_its_own_types],
)


def parts(data: Dataset) -> dict[str, Any]:
    assert data.preparation is not None
    return {
        "features": data.features.tolist(),
        "label": data.label.tolist(),
        "classes": data.classes,
        "sites": data.columns["hospital"].tolist(),
        "preparation": data.preparation.to_json(),
        # A frame has no separator and no encoding.
        "notes": {name: one for name, one in data.notes.items() if name != "read_as"},
    }


@KINDS
@pytest.mark.parametrize("missing", ["mean", "drop"])
def test_a_frame_is_the_table_that_its_own_file_is(tmp_path, make, missing):
    frame = make(tmp_path / "t.csv")
    chosen = {**CHOSEN, "missing": missing}
    found = parts(datasets.from_frame(frame, **chosen))
    read = datasets.load(str(tmp_path / "t.csv"), choices=TableChoices(**chosen))
    assert found == parts(read)
    # And it is what was put in, by a reckoning of our own.
    put = columns()
    gaps = [n for n in range(ROWS) if None in [put[name][n] for name in put]]
    kept = (
        range(ROWS) if missing == "mean" else [n for n in range(ROWS) if n not in gaps]
    )
    assert len(gaps) > 10 and len(found["label"]) == len(kept)
    there = [put["pressure"][n] for n in kept if put["pressure"][n] is not None]
    filled = [put["pressure"][n] or np.mean(there) for n in kept]
    np.testing.assert_allclose(np.asarray(found["features"])[:, 1], filled)
    lacking = ["(missing)"] if missing == "mean" else []
    assert found["notes"]["encoded"] == {"smoker": [*lacking, "former", "no", "yes"]}
    assert found["sites"] == [put["hospital"][n] for n in kept]


@KINDS
def test_a_gap_in_a_frame_is_named_by_its_row(tmp_path, make):
    with pytest.raises(InvalidInputError, match="row 4, column 'pressure'.*--missing"):
        datasets.from_frame(make(tmp_path / "t.csv"), **CHOSEN)


@pytest.mark.parametrize("make", [of_pandas, of_polars])
def test_the_hospitals_of_a_frame_are_clients_of_a_task(tmp_path, make):
    data = datasets.from_frame(make(tmp_path / "t.csv"), missing="mean", **CHOSEN)
    task = find("regularization")(data=data, site="hospital")
    assert task.names == tuple(PLACES)
    assert task.preparation is not None
    assert "smoker=yes" in task.preparation.feature_names


DAY = datetime.datetime(2024, 3, 1)
NANOSECONDS = {
    "pandas": lambda: pandas.DataFrame(
        {
            "when": np.asarray([DAY] * ROWS, "datetime64[ns]"),
            "stay": np.asarray([datetime.timedelta(days=2)] * ROWS, "timedelta64[ns]"),
            "sick": [0, 1] * (ROWS // 2),
        }
    ),
    "polars": lambda: polars.DataFrame(
        {
            "when": polars.Series([DAY] * ROWS, dtype=polars.Datetime("ns")),
            "stay": polars.Series(
                [datetime.timedelta(days=2)] * ROWS, dtype=polars.Duration("ns")
            ),
            "sick": [0, 1] * (ROWS // 2),
        }
    ),
}


@pytest.mark.parametrize("library", NANOSECONDS)
def test_dates_and_durations_of_a_frame_are_no_numbers(library):
    told = (
        "column 'when' holds dates, such as '2024-03-01T00:00:00' .year first.; column "
        "'stay' holds values of type timedelta, neither numbers nor text"
    )
    with pytest.raises(InvalidInputError, match=f"{told}.*--ignore when,stay"):
        datasets.from_frame(NANOSECONDS[library]())


def test_numbers_of_numpy_among_objects_are_numbers():
    values = [np.int64(3), None, np.float32(0.5), np.bool_(True)] * 5
    frame = pandas.DataFrame({"a": pandas.Series(values, dtype=object)})
    frame["label"] = [0, 1] * 10
    found = datasets.from_frame(frame, missing="mean").features[:4, 0]
    np.testing.assert_allclose(found, [3, 1.5, 0.5, 1])


def test_what_is_no_frame_yet_is_told():
    with pytest.raises(InvalidInputError, match=r"LazyFrame .* Give frame.collect\(\)"):
        datasets.from_frame(polars.LazyFrame(columns()))
