"""What a method needs is found in its program; the list is chosen by it."""

import pytest
from typer.testing import CliRunner

from fedbilevel import algorithms
from fedbilevel.cli.app import app
from fedbilevel.cli.listing import _WORDS
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.traits import (
    KNOWN,
    QUESTIONS,
    TRAITS,
    fitting,
    known_how,
    question_of,
    traits_of,
)

# As the papers have it; the answers of the package come from the programs.
EXPECTED = {
    "fedavg": set(),
    "fedcomgate": {"all-clients"},
    "bvr-l-sgd": {"more-exchanges", "single-replies"},
    "fednest-sgd": {"hessian", "more-exchanges"},
    "fedmbo": {"hessian", "more-exchanges", "single-replies"},
    "local-bsgvrm": {"hessian", "alike-clients"},
    "fedbio-clientwise": {"hessian"},
    "soba": {"hessian"},
    "bio-bred": {"hessian"},  # which differentiates through lower steps
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_needs_are_those_of_the_paper(name):
    assert set(traits_of(name)) == EXPECTED[name]


OWN = '''
from typing import ClassVar

from fedbilevel.algorithms import AbstractAlgorithm, Iterate, Number, Pair, averaged
from fedbilevel.schedules import count, number


class Own(AbstractAlgorithm):
    """A step on y."""

    lr: Number = number("step of y", step="lower")
    local_steps: int = count("local steps", kw_only=True)

    def init_server(self, x, y):
        return Iterate(Pair(x, y))

    def init_client(self, x, y):
        return None

    def phases(self):
        return (averaged(self.local),)

    def point(self, server):
        return server.point

    def local(self, message, client, oracle, turn):
        x, y = message.point.x, message.point.y
        zeta = oracle.draw_lower(turn.keys(1)[0])
        d = oracle.lower_gradient(x, y, zeta)
        SECOND
        return client, Iterate(Pair(x, y - self.lr * d))
'''


@pytest.mark.parametrize(
    ("line", "expected"),
    [("pass", ()), ("d = oracle.hessian_product(x, y, d, zeta)", ("hessian",))],
)
def test_a_call_of_an_own_method_is_found(tmp_path, line, expected):
    path = tmp_path / "own.py"
    path.write_text(OWN.replace("SECOND", line))
    assert traits_of(f"{path}:Own") == expected


def test_every_method_answers_one_question_and_is_known_in_one_way():
    every = [algorithms.find(name) for name in algorithms.names()]
    assert {question_of(one) for one in every} == set(QUESTIONS)
    assert {known_how(one) for one in every} == set(KNOWN)
    by_question = [fitting(question=word) for word in QUESTIONS]
    assert sorted(e.name for each in by_question for e in each) == algorithms.names()
    single = {one.name for one in fitting(question="single-level")}
    assert {"fedavg", "scaffold", "stem"} <= single and "fedbio" not in single


def test_filters_leave_what_fits():
    found = fitting(question="single-level", without=["all-clients", "more-exchanges"])
    names = {one.name for one in found}
    assert "scaffold" in names and not {"fedcomgate", "bvr-l-sgd"} & names
    found = fitting(question="single-level", needs=["more-exchanges"])
    assert {one.name for one in found} == {"bvr-l-sgd"}
    with pytest.raises(InvalidInputError, match="cannot need hessian and do without"):
        fitting(needs=["hessian"], without=["hessian"])


def invoke(*words: str):
    return CliRunner().invoke(app, ["list", *words], env={"COLUMNS": "80"})


def test_the_list_is_chosen_and_says_where_nothing_fits():
    done = invoke("algorithms", "--question", "single-level", "--known", "read")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Leave out one of --question, --known." in done.stderr
    done = invoke("algorithms", "--question", "own-y")
    assert "fedbioacc-local" in done.stdout and "fedavg" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("algorithms --needs hesian", "unknown need 'hesian'. Did you mean 'hessian'?"),
        ("algorithms --question shared", "unknown question 'shared'"),
        ("algorithms --known red", "unknown value of known 'red'. Did you mean 'read'"),
        ("tasks --needs hessian", "--needs chooses among all algorithms"),
        ("algorithms fedbio --known read", "--known chooses among all algorithms"),
    ],
)
def test_what_cannot_be_chosen_is_refused(words, told):
    done = invoke(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in " ".join(done.stderr.split())


def test_needs_are_told_of_methods_and_not_of_files(tmp_path):
    told = " ".join(invoke("algorithms", "fedbio").stdout.split())
    assert "Needs: " in told and "(hessian)" in told
    # To learn what a file needs, it would have to be traced.
    own = tmp_path / "own.py"
    own.write_text("from fedbilevel import FedBiO\n\n\nclass Own(FedBiO):\n    ...\n")
    done = invoke("algorithms", f"{own}:Own")
    assert done.exit_code == 0 and "Needs: " not in done.stdout


def test_the_help_names_every_need():
    assert all(word in _WORDS for word in TRAITS)
