"""Preparations: fitted from sums of sites as from pooled rows, saved, and applied."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.datasets import Preparation, Sums
from fedbilevel.datasets._preparation_files import Node
from fedbilevel.datasets.sums import OTHER, Moments
from fedbilevel.errors import InvalidInputError

COLOURS = np.asarray(["red", "green", "blue", "gray"])


def fails(message):
    return pytest.raises(InvalidInputError, match=message)


def rows_of(seed: int, count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    age = draw.normal(2000, 3, count)  # a large mean costs squared sums their digits
    age[draw.random(count) < 0.2] = np.nan
    return {"age": age, "colour": COLOURS[draw.integers(0, 4, count)]}


def fit(sums: Sums, **how: bool) -> Any:
    """Return the preparation; its columns are known to be of the right kind."""
    return Preparation.fit(sums, **how)


def sums_of(rows: dict[str, np.ndarray], label: np.ndarray) -> Sums:
    return Sums.of(rows, "kind", label, minimum=1)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_sums_of_sites_prepare_as_pooled_rows_do(seed, sizes):
    rows = rows_of(seed, sum(sizes))
    # At least two numbers and two texts, so that no column is left out.
    rows["age"][:2], rows["colour"][:2] = (1990.0, 1991.0), ("red", "blue")
    label = np.random.default_rng(seed).integers(0, 12, sum(sizes))
    ends = np.cumsum(sizes)[:-1]
    parts = zip(*(np.split(rows[name], ends) for name in rows), strict=True)
    sites = [
        Sums.from_json(sums_of(dict(zip(rows, part, strict=True)), own).to_json())
        for part, own in zip(parts, np.split(label, ends), strict=True)
    ]
    merged = fit(Sums.merged(sites), gaps=True)
    pooled = fit(sums_of(rows, label), gaps=True)
    there = rows["age"][~np.isnan(rows["age"])]
    age, one = merged.columns[0], pooled.columns[0]
    for found in (age, one):
        np.testing.assert_allclose(
            [found.center, found.spread, found.fill],
            [there.mean(), there.std(), there.mean()],
            rtol=1e-12,
        )
    assert merged.columns[1].values == tuple(sorted(set(rows["colour"])))
    assert merged.label.classes == tuple(map(str, sorted(set(label))))
    np.testing.assert_allclose(merged.apply(rows), pooled.apply(rows), atol=1e-9)


def test_features_are_as_by_hand():
    rows = {
        "age": np.asarray([1.0, np.nan, 3.0]),
        "colour": np.asarray(["red", "", "blue"]),
    }
    label = np.asarray(["no", "yes", "no"])
    made = fit(sums_of(rows, label), gaps=True)
    names = ("age", "colour=(missing)", "colour=blue", "colour=red")
    assert made.feature_names == names
    expected = [[-1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0]]
    np.testing.assert_allclose(made.apply(rows), expected)
    assert list(made.label.encode(label)) == [0, 1, 0]
    # Another order of columns, more of them, and numbers as text change nothing.
    more = {"other": label, "colour": rows["colour"], "age": np.asarray(["1", "", "3"])}
    np.testing.assert_allclose(made.apply(more), expected)
    again = Preparation.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)


def test_a_target_goes_there_and_back():
    target = np.asarray([10.0, 14.0])
    rows = {"a": np.asarray([0.0, 1.0])}
    sums = Sums.of(rows, "price", target, is_target=True, minimum=1)
    made: Any = Preparation.from_json(fit(sums).to_json())
    np.testing.assert_allclose(made.label.encode(target), [-1, 1])
    np.testing.assert_allclose(made.label.decode([-1, 1]), target)
    assert made.label.classes == ()


def test_a_constant_column_is_left_out_and_not_divided_by_rounding():
    rows = {"a": np.full(7, 0.1), "b": np.zeros(7), "c": np.full(7, "x")}
    with fails("none of the columns a, b, c differs between rows"):
        fit(sums_of(rows, np.arange(7)))
    sites = [sums_of({**rows, "d": np.full(7, k)}, np.arange(7)) for k in (1.0, 3.0)]
    # What is the same at each site may differ between them.
    (only,) = fit(Sums.merged(sites)).columns
    assert (only.name, only.center, only.spread) == ("d", 2, 1)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("age", [1.0, np.nan], "the number is missing"),
        ("colour", ["red", "mauve"], "'mauve' is none of the values"),
        ("colour", ["red", ""], "the text is missing"),
        ("age", ["1", "old"], "'old' is not a finite"),
        ("age", [1.0, np.inf], "'inf' is not"),
    ],
)
def test_what_was_not_prepared_for_is_refused(name, changed, message):
    rows = {"age": np.asarray([1.0, 2.0]), "colour": np.asarray(["red", "blue"])}
    made = fit(sums_of(rows, np.arange(2)))
    with fails(f"row 1, column '{name}': {message}"):
        made.apply({**rows, name: np.asarray(changed)})
    with fails("there is no column 'colour', which the model needs. There are age"):
        made.apply({"age": rows["age"]})
    with fails("row 0, column 'kind': '2' is none of the classes 0, 1"):
        made.label.encode(np.asarray([2]))


def test_sites_that_differ_are_refused():
    one = sums_of({"a": np.arange(2.0)}, np.arange(2))
    with fails("only some have 'b'"):
        Sums.merged([one, sums_of({"a": np.ones(2), "b": np.ones(2)}, np.arange(2))])
    with fails("column 'a' holds numbers at one site and text"):
        Sums.merged([one, sums_of({"a": COLOURS[:2]}, np.arange(2))])
    with fails("label 'kind' holds numbers at one site"):
        rows = {"a": np.ones(2)}
        target = Sums.of(rows, "kind", np.ones(2), is_target=True, minimum=1)
        Sums.merged([one, target])
    empty = sums_of({"a": np.full(2, np.nan)}, np.arange(2))
    with fails("none of the columns a differs"):
        fit(empty)
    assert fit(Sums.merged([one, empty])).columns[0].center == 0.5


FEW = {
    "age": np.asarray([40.0, *[np.nan] * 11]),
    "dose": np.arange(12.0),
    "colour": np.asarray(["mauve", *["red"] * 5, *["blue"] * 4, *[""] * 2]),
}


def test_nothing_of_few_rows_is_told():
    """Not even in the text of a file: one number, and texts of one and four rows."""
    label = np.arange(12) % 2
    told = Sums.of(FEW, "kind", label)
    text = told.to_json()
    assert "40" not in text and "mauve" not in text and "blue" not in text
    assert told.columns["age"] == Moments(0, 0.0, 0.0)
    assert told.columns["dose"] == Moments.of(FEW["dose"])
    assert told.columns["colour"] == (OTHER, "red")
    whole = sums_of(FEW, label)
    assert whole.columns["colour"] == ("(missing)", "blue", "mauve", "red")
    assert whole.columns["age"] == Moments(1, 40.0, 0.0)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_site_of_few_rows_tells_nothing(rows):
    few = {name: values[:rows] for name, values in FEW.items()}
    with fails(f"{rows} rows are too few: their sums would reveal them. Give 10 at"):
        Sums.of(few, "kind", np.arange(rows))
    assert sums_of(few, np.arange(rows)).rows == rows


def test_texts_that_no_site_holds_often_are_one_feature():
    """Here and at prediction; one that another site holds often keeps its name."""
    label = np.arange(12) % 2
    there = {**FEW, "colour": np.asarray(["blue"] * 12)}
    sites = [Sums.of(one, "kind", label) for one in (FEW, there)]
    # Nobody tells a number of the age, so nobody learns from it.
    assert [one.name for one in fit(Sums.merged(sites)).columns] == ["dose", "colour"]
    both = [{**one, "age": np.arange(12.0)} for one in (FEW, there)]
    sites = [Sums.of(one, "kind", label) for one in both]
    made = fit(Sums.merged(sites), gaps=True)
    made = Preparation.from_json(made.to_json())
    assert made.feature_names[2:] == (f"colour={OTHER}", "colour=blue", "colour=red")
    colours = ["mauve", "blue", "red", "never seen", "", OTHER]
    rows = {name: np.zeros(6) for name in FEW} | {"colour": np.asarray(colours)}
    other, blue, red = [1, 0, 0], [0, 1, 0], [0, 0, 1]
    expected = [other, blue, red, other, other, other]
    assert made.encode(rows)[:, 2:].tolist() == expected
    rare = {**both[0], "colour": np.asarray(list("abcdefghijkl"))}
    found = fit(Sums.of(rare, "kind", label)).columns
    assert [one.name for one in found] == ["age", "dose"]


GOOD = json.loads(
    fit(sums_of({"age": np.arange(2.0), "colour": COLOURS[:2]}, np.arange(2))).to_json()
)


def with_column(**changes):
    first, *others = GOOD["columns"]
    return {**GOOD, "columns": [{**first, **changes}, *others]}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {**GOOD, "version": 2},
        {**GOOD, "extra": 1},
        {**GOOD, "columns": []},
        {**GOOD, "columns": [*GOOD["columns"], GOOD["columns"][0]]},
        {**GOOD, "label": {"kind": "classes", "name": "x", "classes": ["a", "a"]}},
        {**GOOD, "label": {"kind": "classes", "name": "x"}},
        with_column(kind="pickle"),
        with_column(spread=0),
        with_column(spread=10**400),
        with_column(center="1"),
        with_column(center=True),
        with_column(name=""),
        with_column(name="n" * 2000),
        with_column(more=1),
        {**GOOD, "columns": [{**GOOD["columns"][1], "values": ["red", "green"]}]},
        {**GOOD, "columns": [{**GOOD["columns"][1], "values": []}]},
    ],
    ids=str,
)
def test_a_file_that_is_no_preparation_is_refused(content):
    with pytest.raises(InvalidInputError):
        Preparation.from_json(json.dumps(content))


def test_a_count_is_a_whole_number_that_every_program_holds():
    for right in (0, 107, 2**53 - 1):
        assert Node("here", {"rows": right}).count("rows") == right
    for wrong in (-1, 2**53, True, 2.0, "2", None):
        with pytest.raises(InvalidInputError, match="a count"):
            Node("here", {"rows": wrong}).count("rows")


@pytest.mark.parametrize("text", ["", "[" * 10**5, '{"a": NaN}', '{"fedbilevel": 1}'])
def test_a_text_that_is_no_preparation_is_refused(text):
    for kind in (Preparation, Sums):
        with pytest.raises(InvalidInputError, match="this is no file of"):
            kind.from_json(text)
