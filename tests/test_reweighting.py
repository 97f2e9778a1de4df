"""The task reweighting: what counts how much, texts of one's own, and what is left."""

import csv
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.datasets.texts import Example
from fedbilevel.datasets.tokens import Bytes, token_rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.models.adapters import joined
from fedbilevel.models.peft import read_adapters
from fedbilevel.models.transformer import Architecture, initialize, logits
from fedbilevel.problem import Oracle
from fedbilevel.tasks import _pretraining, _texts, _transformers, reweighting

SMALL = {"width": 8, "rank": 2, "adapted": "query,down"}


@pytest.fixture(scope="module", autouse=True)
def untrained():
    """Leave pretraining out where no test is about it: compiling it takes longest."""

    def initialized(width: int, blocks: int, longest: int):
        made = Architecture(258, width, blocks, 2, 1, width // 2, width, longest)
        return initialize(made, jr.key(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_transformers, "pretrained", initialized)
        yield


def lines(*held) -> str:
    return "".join(json.dumps(one) + "\n" for one in held)


def pair(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


@pytest.fixture
def texts(tmp_path) -> Path:
    """Return a folder of two sites that have different numbers of texts."""
    trusted = lines(*(pair("1+1=", "2") for _ in range(5)), {"text": "three"})
    contents = {
        "north/notes": lines(pair("a", "bc"), pair("d", "efgh"), {"text": "ij"}),
        "north/forum": lines(pair("k", "l")),
        "north/trusted": trusted,
        "south/notes": lines(pair("mn", "o")),
        "south/trusted": trusted + lines(pair("5+5=", "10")),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return tmp_path


def held(folder: Path, by: str, clients: int = 0, length: int = 8) -> _texts.Held:
    return _texts.held_texts(
        _texts.texts_of(str(folder), clients, 0), Bytes(), length, by
    )


# Tokens


def test_only_responses_and_their_ends_are_learned():
    examples = [Example("ab", "c"), Example("", "de"), Example("abcd", "e")]
    rows = token_rows(examples, Bytes(), 5)
    a, b, c, d, e = b"abcde"
    begin, end = 256, 257
    assert rows.tokens.tolist() == [[begin, a, b, c, end], [begin, d, e, end, end]]
    assert rows.counted.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    # The last one has its answer after the fifth token.
    assert (rows.cut, rows.left_out) == (0, 1)
    rows = token_rows([Example("ab", "cde")], Bytes(), 5)
    assert rows.tokens.tolist() == [[begin, a, b, c, d]]
    assert (rows.cut, rows.left_out) == (1, 0)


# Losses


def token_mean(task, y, rows: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the mean cross entropy of marked tokens, summed token by token."""
    frozen = task.problem.frozen
    every = np.stack([tokens for tokens, _ in rows])
    found = RUN(frozen.base, joined(y, frozen.adapters), every)
    total, count = 0.0, 0
    for scores, (tokens, counted) in zip(np.asarray(found), rows, strict=True):
        for t in np.flatnonzero(counted):
            share = np.exp(scores[t - 1]) / np.exp(scores[t - 1]).sum()
            total -= np.log(share[tokens[t]])
            count += 1
    return total / count


RUN = jax.jit(logits)


def client_mean(task, level: str, x, y) -> float:
    @jax.jit
    def loss(client):
        oracle = Oracle(task.problem, task.data, client)
        batch = getattr(oracle, f"all_{level}")()
        return getattr(oracle, f"{level}_loss")(x, y, batch)

    return float(np.mean([loss(k) for k in range(task.data.clients)]))


def rows_of(task, level: str, source: int | None = None):
    rows, sizes = getattr(task.data, level), getattr(task.data, f"{level}_sizes")
    return [
        (np.asarray(rows["tokens"][k, i]), np.asarray(rows["counted"][k, i]))
        for k in range(task.data.clients)
        for i in range(int(sizes[k]))
        if source is None or rows["source"][k, i] == source
    ]


def test_every_source_counts_by_its_weight_and_every_token_alike(texts):
    task = reweighting.make(data=str(texts), length=8, penalty=0.5, **SMALL)
    assert task.names == ("north", "south")
    assert task.metrics.sources == ("forum", "notes")  # type: ignore[union-attr]
    x = jnp.asarray([0.3, -0.4])
    y = jax.tree.map(lambda leaf: leaf + 0.1, task.y)
    assert len(rows_of(task, "lower", 1)) == 4  # of both sites
    means = [token_mean(task, y, rows_of(task, "lower", s)) for s in (0, 1)]
    weights = np.exp(x) / np.exp(x).sum()
    square = sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(y))
    expected = weights @ np.array(means) + 0.25 * square
    assert client_mean(task, "lower", x, y) == pytest.approx(expected, rel=1e-9)
    judged = token_mean(task, y, rows_of(task, "upper"))
    assert client_mean(task, "upper", x, y) == pytest.approx(judged, rel=1e-9)
    measured = task.metrics(x, y, task.problem.frozen)  # type: ignore[misc]
    assert measured["weight_notes"] == pytest.approx(weights[1])
    # Bytes of half the length: the same to three digits, and y is as it was.
    half = reweighting.make(
        data=str(texts), length=8, penalty=0.5, precision="bfloat16", **SMALL
    )
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(half.problem.frozen)}
    assert kinds == {"bfloat16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(half.y)} == {x.dtype}
    close = client_mean(half, "lower", x, y)
    assert close != expected and close == pytest.approx(expected, rel=1e-2)


def test_sources_are_files_sites_or_both(texts):
    def sources(by: str) -> list[str]:
        found = held(texts, by)
        assert sum(one["rows"] for one in found.summary["sources"]) == 5
        return list(found.sources)

    assert sources("file") == ["forum", "notes"]
    assert sources("site") == ["north", "south"]
    assert sources("both") == ["north/forum", "north/notes", "south/notes"]


def test_texts_that_are_nobodys_are_dealt_out(tmp_path):
    every = [pair(f"{n}", "x") for n in range(10)]
    (tmp_path / "web.jsonl").write_text(lines(*every))
    (tmp_path / "trusted.jsonl").write_text(lines(*every))
    found = held(tmp_path, "file", 2)
    assert [len(one["source"]) for one in found.lower] == [5, 5]
    assert [len(one["tokens"]) for one in found.upper] == [4, 4]
    tested = {tuple(row) for row in found.test.tokens}
    judging = {tuple(row) for one in found.upper for row in one["tokens"]}
    assert len(tested) == 2 and not tested & judging


# What is wrong with texts


def wrong(name: str, content: str | None):
    def change(folder: Path) -> None:
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (wrong("north/notes.jsonl", '{"text": "a"}\n{"te'), "line 2 is no JSON: "),
        (wrong("north/notes.jsonl", "[1]\n"), "line 1 is no JSON object"),
        (wrong("north/notes.jsonl", "\n"), "notes.jsonl is empty"),
        (wrong("north/notes.jsonl", '{"prompt": "a"}'), 'line 1 has no "response"'),
        (wrong("north/notes.jsonl", '{"text": 3}'), '"text" is no text'),
        (wrong("north/notes.jsonl", '{"text": ""}'), '"text" is empty'),
        (wrong("north/trusted.jsonl", None), "north holds no trusted.jsonl"),
        (wrong("south/notes.jsonl", None), "south holds no SOURCE.jsonl"),
        (wrong("web.jsonl", '{"text": "a"}'), "beside them web.jsonl"),
        (wrong("north/no*te.jsonl", '{"text": "a"}'), "Rename it"),
        (wrong("south/notes.jsonl", lines(pair("x" * 90, "y"))), "length=N, longer"),
    ],
    ids=lambda one: None if callable(one) else one,
)
def test_what_is_wrong_with_texts_is_told(texts, change, told):
    change(texts)
    with pytest.raises(InvalidInputError, match=told) as error:
        held(texts, "file", length=16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": "nowhere"}, "nowhere is no folder"),
        ({"adapted": "querry"}, "unknown projection 'querry'. Did you mean 'query'"),
        ({"trained": "a"}, "unknown value of trained 'a'"),
        ({"precision": "float8"}, "unknown value of precision 'float8'"),
        ({"rank": 0}, "rank=0: it is at least 1"),
        ({"length": 1}, "length=1: a row has 2 tokens or more"),
        ({"width": 12}, "width=12, blocks=1: give a multiple of 8"),
        ({"model": "nowhere"}, "there is no nowhere/config.json"),
    ],
    ids=str,
)
def test_what_is_wrong_with_options_is_told(options, told):
    with pytest.raises(InvalidInputError, match=told):
        reweighting.make(2, **{**SMALL, **options})


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = {f"word{n}": n for n in range(300)} | {"</s>": 300}
    whole = library.Tokenizer(library.models.WordLevel(words, unk_token="word0"))
    path = tmp_path / "tokenizer.json"
    whole.save(str(path))
    with pytest.raises(InvalidInputError, match="301 tokens, but the vocabulary"):
        _transformers.base_of("built-in", str(path), 8, (8, 1), None)
    path.write_text("{}")
    with pytest.raises(InvalidInputError, match="is no tokenizer"):
        _transformers.base_of("built-in", str(path), 8, (8, 1), None)


# What is left of a run


def test_a_run_leaves_weights_and_adapters(tmp_path):
    options = {name: str(value) for name, value in SMALL.items()}
    experiment = Experiment("reweighting", clients=2, rounds=1, options=options)
    task, _, _ = experiment.build_task()
    point = {"x": np.array([1.0, 0.0, 0.0, 2.0])}
    for number, name in enumerate(("down.b", "query.b")):
        leaf = jax.tree.leaves(task.y)[number]
        point[f"y.{name}"] = np.full(leaf.shape, number + 1.0)
    (listed,) = task.listing(task, point).values()  # type: ignore[misc]
    assert [row[0] for row in listed.rows] == ["wrong", "colors", "letters", "sounds"]
    assert sum(row[1] for row in listed.rows) == pytest.approx(1)
    files = task.files(task, point)  # type: ignore[misc]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    made = task.problem.frozen.base.architecture
    found: Any = read_adapters(tmp_path / "adapter", made, "llama")
    assert np.all(np.asarray(found["query"].b) == 2) and found["down"].scale == 2.0
    expected = np.asarray(task.problem.frozen.adapters["query"].a)
    np.testing.assert_allclose(found["query"].a, expected, rtol=1e-6)


@pytest.mark.slow
def test_noise_loses_its_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(_transformers, "pretrained", _pretraining.pretrained)
    result = Experiment("reweighting", clients=4).run(tmp_path / "run")
    assert result.final["weight_wrong"] < 0.05 and result.final["weight_letters"] < 0.05
    assert result.final["weight_colors"] > 0.1 and result.final["weight_sounds"] > 0.1
    with (tmp_path / "run" / "weights.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["source"] for row in rows[:2]} == {"colors", "sounds"}
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
