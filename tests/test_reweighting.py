"""The task reweighting: what counts how much, texts of one's own, and what is left."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import FedAvg
from fedbilevel.datasets import tokens as token_module
from fedbilevel.datasets.texts import Example
from fedbilevel.datasets.tokens import Bytes, token_rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import agreed, serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.models.adapters import joined
from fedbilevel.models.peft import read_adapters
from fedbilevel.models.transformer import Architecture, initialize, logits
from fedbilevel.problem import Oracle
from fedbilevel.problem.checks import check_problem
from fedbilevel.runtime.contract import failure
from fedbilevel.tasks import _texts, reweighting
from fedbilevel.tasks._texts import TokenCounts, read_counts
from tests.federation import Loopback

PRETRAINED = reweighting.pretrained
SMALL = {"width": 8, "rank": 2, "adapted": "query,down"}


@pytest.fixture(scope="module", autouse=True)
def untrained():
    """Leave pretraining out where no test is about it: compiling it takes longest."""

    def initialized(width: int, blocks: int, longest: int):
        made = Architecture(258, width, blocks, 2, 1, width // 2, width, longest)
        return initialize(made, jr.key(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reweighting, "pretrained", initialized)
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
    counts = TokenCounts()
    given = _texts.texts_of(str(folder), clients, 0, counts)
    return _texts.held_texts(given, Bytes(), length, by, counts)


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


def test_texts_of_files_may_be_longer_than_generated_ones(texts):
    (texts / "south/notes.jsonl").write_text(lines(pair("x" * 200, "y")))
    task = reweighting.make(data=str(texts), **SMALL)
    assert int(task.data.lower_sizes.sum()) == 5


@pytest.mark.slow
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
        reweighting.base_of("built-in", str(path), 8, (8, 1), None)
    path.write_text("{}")
    with pytest.raises(InvalidInputError, match="is no tokenizer"):
        reweighting.base_of("built-in", str(path), 8, (8, 1), None)


class StandIn:
    """A tokenizer of the package tokenizers, also where that is not installed."""

    Tokenizer: Any = None

    def from_file(self, path):
        return self

    def no_truncation(self):
        self.whole = True

    no_padding = no_truncation

    def get_vocab(self):
        return {"a": 0, "</s>": 7}

    def token_to_id(self, name):
        return self.get_vocab().get(name)


@pytest.mark.parametrize(("given", "end"), [(None, 7), (3, 3)])
def test_a_text_ends_as_was_said_or_as_the_file_says(tmp_path, monkeypatch, given, end):
    held = StandIn()
    held.Tokenizer = held
    monkeypatch.setattr(token_module, "needed", lambda name, sentence: held)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    found = token_module.Subwords(path, given)
    assert (found.end, found.vocabulary) == (end, 8)


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
    monkeypatch.setattr(reweighting, "pretrained", PRETRAINED)
    result = Experiment("reweighting", clients=4).run(tmp_path / "run")
    assert result.final["weight_wrong"] < 0.05 and result.final["weight_letters"] < 0.05
    assert result.final["weight_colors"] > 0.1 and result.final["weight_sounds"] > 0.1
    with (tmp_path / "run" / "weights.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["source"] for row in rows[:2]} == {"colors", "sounds"}
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


# Sites of their own


TERMS = Terms(patience=1, deadline=60.0)
WORDS = {name: str(value) for name, value in SMALL.items()} | {"length": "8"}
SETTINGS = Experiment("reweighting", clients=2, rounds=2, batch=2, local_steps=2)


def ignore(*_) -> None:
    """Do nothing with what is told."""


def with_options(**more: str) -> Experiment:
    return replace(SETTINGS, options={**WORDS, **more})


def sites_of(texts: Path, given: Experiment) -> Loopback:
    """Return sites that see their own folders alone."""
    sites = {}
    for client, name in enumerate(("north", "south")):
        own = {**given.options, "data": str(texts / name)}
        sites[client] = build_site(replace(given, options=own), client)
    return Loopback(sites)


def test_a_site_alone_counts_as_it_does_among_all(texts):
    every = held(texts, "file")
    for client, name in enumerate(("north", "south")):
        counts = TokenCounts(2, read_counts("forum:2,notes:13,trusted:31"))
        dealt = _texts.texts_of(str(texts / name), 1, 0, counts)
        own = _texts.held_texts(dealt, Bytes(), 8, "file", counts)
        assert own.sources == every.sources and own.names == (name,)
        for level in ("lower", "upper"):
            (found,), expected = getattr(own, level), getattr(every, level)[client]
            assert found.keys() == expected.keys()
            for leaf in found:
                np.testing.assert_array_equal(found[leaf], expected[leaf])
    dealt = _texts.texts_of(str(texts / "south"), 1, 0, TokenCounts(sites=2))
    by_site = _texts.held_texts(dealt, Bytes(), 8, "site", TokenCounts())
    assert by_site.sources == ("south",)


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("", "has forum:2,notes:11,trusted:14 tokens. Add up those of all 2 sites"),
        ("forum:2,notes:13", "as in notes:1200,trusted:96"),
        ("forum:2,notes:13,trusted", "as in notes:1200,trusted:96"),
        ("forum:2,notes:13,notes:1,trusted:31", "as in notes:1200,trusted:96"),
        ("forum:1,notes:13,trusted:31", "2 tokens of 'forum', but tokens= says 1"),
        ("notes:13,trusted:31", "2 tokens of 'forum', a source that tokens= does not"),
    ],
)
def test_what_is_wrong_with_the_tokens_of_all_sites_is_told(texts, tokens, told):
    with pytest.raises(InvalidInputError, match=told) as error:
        reweighting.make(
            1, data=str(texts / "north"), sites=2, tokens=tokens, length=8, **SMALL
        )
    assert "\n" not in str(error.value)


def test_a_site_whose_base_differs_in_one_number_is_refused():
    task = reweighting.make(2, **SMALL)
    changed = eqx.tree_at(
        lambda one: one.problem.frozen.base.weights["up"],
        task,
        replace_fn=lambda leaf: leaf.at[0, 1, 2].add(1e-9),
    )
    members = {
        client: SimpleNamespace(facts={"alike": one.alike(one)}, start=[])  # type: ignore[misc]
        for client, one in enumerate((task, task, changed))
    }
    told = "^the model of client 2 is not that of client 0: .* Copy the same files"
    with pytest.raises(InvalidInputError, match=told):
        agreed(SETTINGS, SimpleNamespace(members=members))  # type: ignore[arg-type]


def placed(model: str, tokenizer: str, *rest: Any) -> reweighting.Base:
    """Return the base of a folder; the tokenizer of the folder `odd` is another."""
    made = reweighting.pretrained(8, 1, 8)
    known = Bytes(fingerprint="odd" if tokenizer == "odd" else "bytes")
    return reweighting.Base(made, known, "llama", model)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["there", "odd"])
def test_sites_have_their_model_where_they_like_and_the_same_one(
    texts, tmp_path, monkeypatch, tokenizer
):
    monkeypatch.setattr(reweighting, "base_of", placed)
    given = with_options(tokens="forum:2,notes:13,trusted:31", model="server/model")
    sites = {}
    for client, name in enumerate(("north", "south")):
        own = {"data": str(texts / name), "model": f"{name}/model"}
        own |= {"tokenizer": tokenizer if client else "here"}
        options = {**given.options, **own}
        sites[client] = build_site(replace(given, options=options), client)

    class ReachedError(Exception):
        """All agreed, and the run would begin."""

    def begin(*_, **__):
        raise ReachedError

    monkeypatch.setattr("fedbilevel.experiments.federated.executed", begin)
    told = "^the tokenizer of client 1 is not that of client 0: .* Copy the same files"
    odd = tokenizer == "odd"
    kind, told = (InvalidInputError, told) if odd else (ReachedError, "^$")
    with pytest.raises(kind, match=told):
        serve(Loopback(sites), given, tmp_path / "served", TERMS, report=ignore)


@pytest.mark.slow
def test_what_is_not_finite_under_bfloat16_says_so():
    task = reweighting.make(2, precision="bfloat16", **SMALL)
    job: Any = SimpleNamespace(
        algorithm=FedAvg(0.1, local_steps=1), problem=task.problem
    )
    told = r"holds NaN or infinity\. The frozen model was computed in bfloat16: try "
    error = failure(job, (4, 0, 1)).at("South")
    assert re.search(told + "--set precision=float32, or smaller step", str(error))
    lost = eqx.tree_at(
        lambda one: one.base.last_norm.weight,
        task.problem.frozen,
        replace_fn=lambda leaf: jnp.full_like(leaf, jnp.nan),
    )
    broken = replace(task.problem, frozen=lost)
    told = "loss is nan at the start.* computed in bfloat16: try --set precision"
    with pytest.raises(InvalidInputError, match=told):
        check_problem(broken, task.data, task.x, task.y)


@pytest.mark.slow
def test_sites_with_their_own_texts_are_as_in_the_simulator(texts, tmp_path):
    """Tokens, counted by hand: a response's bytes and its end, within 8."""
    given = with_options(tokens="forum:2,notes:13,trusted:31")
    net = sites_of(texts, given)
    served = serve(net, given, tmp_path / "served", TERMS, report=ignore)
    alone = with_options(data=str(texts))
    simulated = alone.run(tmp_path / "simulated")
    for name, leaf in simulated.point.items():
        np.testing.assert_allclose(served.point[name], leaf, rtol=0, atol=1e-12)
        assert np.any(leaf)
    # Logits of two sources and two copies of B: 8 x 2 of queries, 8 x 2 of down. The
    # upper loss of the rounds before goes with them.
    traffic = served.counts["per_client_and_round"]
    assert traffic["floats_down"] == 2 + 2 * (16 + 16) + 1
    for name in ("weights.csv", "adapter/adapter_model.safetensors"):
        found, expected = ((tmp_path / f / name) for f in ("served", "simulated"))
        assert found.stat().st_size > 0 and expected.stat().st_size > 0
    with (tmp_path / "served" / "weights.csv").open(newline="") as file:
        rows = {row["source"]: row for row in csv.DictReader(file)}
    # The server knows how many tokens there are, but not of how many rows.
    told = {name: (row["rows"], row["tokens"]) for name, row in rows.items()}
    assert told == {"forum": ("", "2"), "notes": ("", "13")}
