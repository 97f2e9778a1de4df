"""What is recommended fits, is ranked by what was measured, and says why."""

import json
import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedbilevel import algorithms
from fedbilevel.cli.app import app
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import recommendation
from fedbilevel.experiments.recommendation import Situation, recommend
from fedbilevel.experiments.traits import drifts, question_of, traits_of


def row(setting: str, method: str, mean: float, early: float = 1.0, **more):
    """Return a row as a benchmark writes it."""
    costs = {"exchanges": 201, "megabytes": 4.2, "samples": 5000, "seconds": 1.5}
    found = {"metric": "upper_loss", "mean": mean, "early": early, "diverged": 0.0}
    return {"setting": setting, "method": method, **found, **costs, **more}


def failed(setting: str, method: str):
    reason = "x is not finite in round 3"
    return {"setting": setting, "method": method, "failed": reason, "diverged": 1.0}


ROWS = [
    row("regularization", "fedbio", 0.5, early=0.9, diverged=0.25),
    row("regularization", "simfbo", 0.4, early=0.8),
    row("regularization", "fednest", 0.6, early=0.7),
    row("regularization", "local-bsgvrm", 0.1, early=0.1),
    row("regularization", "fedavg", 0.01),
    row("regularization", "fedbioacc", math.nan),
    row("regularization", "meha", 0.001, early=0.01, note="not to be compared"),
    failed("regularization", "fedbio-controls"),
    row("regularization-shards", "fednest", 0.2),
    row("regularization-shards", "fedbio", 0.3),
    row("quadratic", "fednest-sgd", 0.1),
    row("quadratic", "fedbio", 0.2),
]


DRIFTS = "is right where clients differ, and drifts with local_steps > 1"


def names(task=None, rows=ROWS, **situation) -> list[str]:
    return [one.name for one in recommend(task, Situation(**situation), rows=rows)]


def test_the_order_is_that_of_the_results_of_those_that_fit():
    # local-bsgvrm was better, but inverts every client's own Hessian.
    assert names("regularization")[:2] == ["simfbo", "fedbio"]
    assert names("regularization", differ=False)[0] == "local-bsgvrm"
    assert names("regularization", few_rounds=True)[:2] == ["fednest", "simfbo"]
    assert names("regularization", differ=True)[:2] == ["fednest", "fedbio"]


def test_few_rounds_are_few_exchanges():
    # What took 402 is compared with what took 201; what took 2010 comes after them.
    rows = [
        row("regularization", "fednest", 0.1, early=0.1, exchanges=2010),
        row("regularization", "fedbio", 0.6, early=0.9),
        row("regularization", "fedmsa", 0.5, early=0.8, exchanges=402),
    ]
    order = ["fedmsa", "fedbio"]
    assert names("regularization", rows=rows, few_rounds=True)[:2] == order
    assert names("regularization", rows=rows)[:2] == ["fednest", "fedmsa"]


def test_what_is_told_is_what_was_measured():
    first, second, _ = recommend("regularization", rows=ROWS)
    assert first.measured == (
        "1 of 3 that fit on regularization: upper_loss 0.4; 201 exchanges, 4.2 MB, "
        "5,000 samples, 1.5 s"
    )
    assert second.measured.endswith("25% of its trials diverged")
    assert DRIFTS in first.reasons
    assert first.known == algorithms.find("simfbo").provenance


def test_a_method_that_drifts_is_said_to():
    every = (row("q", one, 0.1) for one in ("fedbio-differences", "fed-f2sa", "bome"))
    without = recommend(None, Situation(hessian=False), rows=[*every])
    reasons = {one.name: one.reasons for one in without}
    assert DRIFTS in reasons["fedbio-differences"] and DRIFTS in reasons["fed-f2sa"]
    assert "is right where clients differ, too" in reasons["bome"]
    assert not any(map(drifts, ("fed-f2sa-controls", "fednest", "fedmsa", "ef-soba")))
    assert drifts("fednest-sgd") and drifts("memfbo")


def test_a_task_that_was_not_measured_goes_by_the_mean_place_elsewhere():
    # fedbio: 2 of 3, 2 of 2 and 2 of 2; fednest: last of 3, and the first of 2.
    first, second, third = recommend("two-client", rows=ROWS)
    assert [first.name, second.name, third.name] == [
        "simfbo",
        "fednest-sgd",
        "newton-bfgs",
    ]
    assert (
        second.measured == "not measured on two-client; elsewhere 1 of 2 on quadratic"
    )
    assert first.measured.endswith("1 of 3 on regularization")


def test_a_method_that_sends_hessians_is_for_small_levels():
    assert names("regularization")[-1] == "newton-bfgs"
    (exact,) = (one for one in recommend("regularization", rows=ROWS)[-1:])
    assert "no rounds or steps to choose" in " ".join(exact.reasons)
    assert "newton-bfgs" not in names("representation")  # x has some thousand entries
    assert "newton-bfgs" not in names("regularization", participants=3)
    assert "newton-bfgs" not in names("regularization", hessian=False)


def test_it_leads_where_the_task_chooses_it(monkeypatch):
    known = recommendation._Known("regularization", "newton-bfgs", 3, small=True)
    monkeypatch.setattr(recommendation, "_known_of", lambda *_: known)
    assert names("regularization")[:2] == ["newton-bfgs", "simfbo"]


def test_without_measurements_the_choice_of_the_task_leads():
    found = recommend("regularization", rows=[])
    assert found[0].name == "fedbio-controls"
    assert {one.measured for one in found} == {"not measured on regularization"}
    assert "is the task's own choice" in found[0].reasons


def test_what_failed_on_the_task_comes_last():
    rows = [failed("regularization", "fedbio-controls")]
    assert "fedbio-controls" not in names("regularization", rows)


@pytest.mark.slow
def test_every_method_fits():
    for one in recommend(None, Situation(clients=8, participants=3), rows=[]):
        assert not {"alike-clients", "all-clients"} & {*traits_of(one.name)}
        assert question_of(algorithms.find(one.name)) == "shared-y"
    for name in names(clients=1, rows=[]):
        assert algorithms.find(name).pools
    for name in names(question="single-level", hessian=False, rows=[]):
        assert "hessian" not in traits_of(name)
    everyone = names(question="single-level", rows=[row("q", "fedcomgate", 0.1)])
    assert everyone[0] == "fedcomgate"
    some = names(
        question="single-level",
        participants=2,
        rows=[row("q", "fedcomgate", 0.1), row("q", "stem", 0.2)],
    )
    assert some[0] == "stem" and "fedcomgate" not in some


def test_a_task_whose_y_is_private_takes_methods_that_bear_it():
    found = recommend("few-shot", rows=[])
    for one in found:
        assert algorithms.find(one.name).kind.allows_private
        assert one.reasons[0] == "finds a y for every client, and a shared x"


@pytest.mark.parametrize(
    ("situation", "told"),
    [
        ({"clients": 0}, "clients=0: give at least 1"),
        ({"clients": 2, "participants": 3}, "participants=3: there are 2 clients"),
        ({"question": "shared"}, "unknown question 'shared'"),
    ],
)
def test_what_cannot_be_is_refused(situation, told):
    with pytest.raises(InvalidInputError, match=told):
        Situation(**situation)


def test_what_no_method_answers_is_told(monkeypatch):
    monkeypatch.setattr(recommendation.traits, "fitting", lambda **_: [])
    with pytest.raises(InvalidInputError, match="'own-y' and does without hessian"):
        recommend(None, Situation(question="own-y", hessian=False), rows=[])


def test_what_is_shipped_is_of_methods_and_settings_that_there_are():
    for one in recommendation.shipped():
        assert one["method"] in algorithms.names()
        assert "failed" in one or math.isfinite(one["mean"])


def invoke(*words: str):
    return CliRunner().invoke(app, ["recommend", *words], env={"COLUMNS": "80"})


def test_the_command_names_them_with_reasons():
    done = invoke("two-client", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["recommended"]
    expected = [one._asdict() for one in recommend("two-client")]
    assert [one["name"] for one in found] == [one["name"] for one in expected]
    done = invoke("two-client", "--differ", "--few-rounds")
    assert "   Try: fedbilevel run two-client --algorithm " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("two-clients", "unknown task 'two-clients'. Did you mean 'two-client'"),
        ("--question shared", "unknown question 'shared'"),
    ],
)
def test_the_command_refuses_in_a_sentence(words, told):
    done = invoke(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in " ".join(done.stderr.split())


SHARED, ALIKE = "finds one y for all clients, and x", "and for those alone"
HESSIANS, ONE = "multiplies by Hessians", "has one exchange a round"


@pytest.mark.parametrize(
    ("method", "own", "question", "told"),
    [
        ("fedbio", False, "shared-y", (SHARED, "is the task's own choice", "drifts")),
        ("fednest", False, "shared-y", (SHARED, "differ, too", HESSIANS, "several")),
        ("local-bsgvrm", False, "shared-y", (SHARED, ALIKE, HESSIANS, ONE)),
        # Of a y of its own every client inverts its own Hessian, and rightly so.
        ("local-bsgvrm", True, "own-y", ("finds a y for every client", HESSIANS, ONE)),
        ("soba", False, "single-machine", ("from rows that are in one", HESSIANS)),
        (
            "newton-bfgs",
            False,
            "shared-y",
            (SHARED, "differ, too", "sends Hessians of y", HESSIANS, ONE),
        ),
    ],
)
def test_every_reason_is_said_and_no_other(method, own, question, told):
    known = SimpleNamespace(algorithm="fedbio", own_lower=own)
    found = recommendation._reasons(algorithms.find(method), known, question)  # pyright: ignore[reportArgumentType]
    if method == "fedbio":
        told = (*told, HESSIANS, ONE)
    assert len(found) == len(told)
    for reason, part in zip(found, told, strict=True):
        assert part in reason
