"""What sites tell of a task and of a finished run: what they announced, no more."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import tasks
from fedbilevel.cli import federation, node
from fedbilevel.cli.app import app
from fedbilevel.cli.arguments import EXPERIMENT, FEDERATED
from fedbilevel.deployment import serving
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import SiteSchema
from fedbilevel.experiments.federated import LEFT_OUT, replay, serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.server.measuring import read_conclusion
from fedbilevel.problem import ClientData, as_weights
from fedbilevel.result import named_leaves
from fedbilevel.tasks import quadratic
from tests.federation import Loopback
from tests.planted import settings, sites_with_rows
from tests.tampering import closed, kind_of, opened, with_header

TERMS = Terms(patience=1, deadline=5.0)


def ignore(*_) -> None:
    """Do nothing with what is told."""


# Conclusions


@pytest.mark.slow
def test_a_site_does_not_write_the_result(tmp_path):
    """The second site tells what it likes: nothing of it is in the result."""
    sites, _ = sites_with_rows(tmp_path, "cleaning", corrupted="0.5")
    experiment = settings("cleaning", corrupted="0.5")
    finals = []
    for lie in ({}, {"upper_loss": 0.0, "test_error": 0.0, "weight_auc": 1e9}):

        def script(node, packet, net, lie=lie):
            answer = net.sites[node].handle(packet)
            if lie and (node, kind_of(packet)) == (1, "conclude"):
                return with_header(answer, info=lie)
            return answer

        net, folder = Loopback(dict(enumerate(sites)), script), tmp_path / str(len(lie))
        result = serve(net, experiment, folder, TERMS, report=ignore)
        finals.append(result.final)
        if lie:
            lines = (folder / LEFT_OUT).read_text().splitlines()
            (entry,) = map(json.loads, lines)
            assert (entry["client"], entry["reason"]) == (1, "conclusion")
    honest, attacked = finals
    own = {"weight_auc", "weight_clean", "weight_corrupted"}
    assert own <= set(honest) == set(attacked)
    for name in set(honest) - own:
        assert honest[name] == attacked[name]
    assert attacked["weight_auc"] <= 1.0


SCHEMA = {"auc": "number", "names": "texts"}


@pytest.mark.parametrize(
    "told",
    [
        {"upper_loss": 0.0},
        {"auc": 10**400},
        {"auc": 2**53},
        {"auc": float("nan")},
        {"auc": float("inf")},
        {"auc": True},
        {"auc": None},
        {"auc": "0.5"},
        {"auc": [0.5]},
        {"names": "a"},
        {"names": [1]},
        {"names": ["x" * 401]},
        {"names": ["x"] * 4097},
        {"names": ["two\nlines"]},
        {"names": ["[red]a[/red]"]},
        {"names": [["a"]]},
        {"": 0.5},
    ],
    ids=lambda told: str(told)[:30],
)
def test_a_conclusion_is_what_was_announced(told):
    with pytest.raises(RefusedError, match="conclusion: "):
        read_conclusion(told, SCHEMA)
    with pytest.raises(RefusedError):
        read_conclusion({"auc": 0.5, **told}, SCHEMA)


def test_a_conclusion_that_was_announced_is_taken():
    for told in ({}, {"auc": 1}, {"auc": 0.5, "names": ["a", "b"]}):
        assert read_conclusion(told, SCHEMA) == told


def by_task():
    """Return all tasks; those that take long are for a release alone."""
    short = ("cleaning", "fairness", "regularization")
    mark = pytest.mark.exhaustive
    return [pytest.param(n, marks=() if n in short else mark) for n in tasks.names()]


@pytest.mark.slow
@pytest.mark.parametrize("name", by_task())
def test_a_task_concludes_with_what_it_announces(name):
    task = tasks.find(name)()
    if task.conclusion is None:
        assert not task.concludes
        return
    clients = task.data.clients

    def stacked(private, tree):
        return jax.tree.map(
            lambda leaf: np.stack([leaf] * clients) if private else np.asarray(leaf),
            tree,
        )

    flags = task.problem.private
    x, y = stacked(flags.x is True, task.x), stacked(flags.y is True, task.y)
    told = task.conclusion(task, {**named_leaves("x", x), **named_leaves("y", y)})
    assert set(told) == set(task.concludes)
    read_conclusion(json.loads(json.dumps(told)), task.concludes)


# Facts


@pytest.fixture(scope="module")
def facts():
    site = build_site(settings("quadratic"), 0, trial=True)
    return json.loads(json.dumps(dict(site.facts)))


def leaves_in(facts) -> int:
    return len(facts["x"]) + len(facts["y"])


ODD_FACTS = [
    ("algorithm", "no such method"),
    ("algorithm", "pooled"),
    ("algorithm", 3),
    ("recommended", []),
    ("recommended", {"rounds": "1", "local_steps": "1"}),
    ("recommended", {"rounds": "-1", "local_steps": "1", "batch": "1"}),
    ("recommended", {"rounds": "9" * 4000, "local_steps": "1", "batch": "1"}),
    ("recommended", {"rounds": 1, "local_steps": "1", "batch": "1"}),
    ("headline", None),
    ("headline", "no metric"),
    ("shows_point", 1),
    ("task", {"a": {"b": 1}}),
    ("task", {"a": "x" * 401}),
    ("task", {"a\n": 1}),
    ("classes", ["a"]),
    ("metrics", "abc"),
    ("metrics", ["a", "a"]),
    ("metrics", ["upper_loss"]),
    ("metrics", ["round"]),
    ("metrics", [["a"]]),
    ("metrics", ["a" * 101]),
    ("concludes", {"auc": "anything"}),
    ("concludes", {"upper_loss": "number"}),
    ("concludes", ["auc"]),
    ("x", ["a", "b", "c"]),
    ("x", {"a": 1}),
    ("y", [1]),
    ("private", [[True]]),
    ("private", [[], []]),
    ("private", [[0], [1]]),
    ("private", None),
    ("more", 1),
]


@pytest.mark.parametrize(("name", "value"), ODD_FACTS, ids=lambda one: str(one)[:30])
def test_facts_that_no_site_tells_are_refused(facts, name, value):
    SiteSchema.check(facts, leaves_in(facts))
    with pytest.raises(RefusedError, match="facts: "):
        SiteSchema.check({**facts, name: value}, leaves_in(facts))


def test_facts_without_one_are_refused(facts):
    for name in facts:
        rest = {other: value for other, value in facts.items() if other != name}
        with pytest.raises(RefusedError, match=name):
            SiteSchema.check(rest, leaves_in(facts))
    with pytest.raises(RefusedError, match="blocks of x and y"):
        SiteSchema.check(facts, leaves_in(facts) + 1)


def test_a_server_says_who_told_odd_facts(tmp_path):
    experiment, told = settings("quadratic"), []
    sites = {k: build_site(experiment, k, trial=True) for k in range(2)}

    def script(node, packet, net):
        head, body = opened(net.sites[node].handle(packet))
        if node == 1:
            head["info"]["facts"]["recommended"] = {"rounds": [1]}
        return closed(net.sites[node].handle(packet), head, body)

    with pytest.raises(FedbilevelError, match=r"clients \[1\] did not come"):
        serve(Loopback(sites, script), experiment, tmp_path, TERMS, report=told.append)
    assert any(line.startswith("node 1 is not taken: facts: ") for line in told)


# Weights


@pytest.mark.parametrize(
    "weights", [(1,), (1, 2, 3), (0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1)]
)
def test_weights_that_cannot_be_are_told(weights):
    with pytest.raises(InvalidInputError, match="2 positive numbers"):
        build_site(replace(settings("quadratic"), weights=weights), 0, trial=True)
    with pytest.raises(InvalidInputError, match="2 positive numbers"):
        replace(settings("quadratic"), weights=weights).build_task()


def test_weights_are_numbers_in_the_precision_of_the_run():
    rows = [np.ones((1, 1))] * 2
    assert as_weights([1e39, 1.0], 2).tolist() == [1e39, 1.0]
    with jax.enable_x64(False):
        for wrong in ([1e39, 1.0], [1e-50, 1.0], [3e38, 3e38]):
            with pytest.raises(InvalidInputError, match="that float32 can hold"):
                ClientData.from_clients(rows, rows, wrong)


def test_a_site_takes_the_weight_of_the_settings_and_no_other(monkeypatch):
    given = replace(settings("quadratic"), weights=(1.0, 4.0))
    assert float(build_site(given, 1, trial=True).work.job.data.weights[0]) == 4.0
    assert "weight" not in build_site(given, 1, trial=True).facts
    made = quadratic.make

    def heavier(*arguments, **options):
        task = made(*arguments, **options)
        data = task.data.weighing([2.0] * task.data.clients)
        return replace(task, data=data)

    monkeypatch.setattr(tasks, "find", lambda name: heavier)
    with pytest.raises(InvalidInputError, match="gives client 1 the weight 2.*Give --"):
        build_site(settings("quadratic"), 1, trial=True)
    assert float(build_site(given, 1, trial=True).work.job.data.weights[0]) == 4.0


def test_a_site_with_other_weights_is_not_taken(tmp_path):
    experiment, told = replace(settings("quadratic"), weights=(1.0, 4.0)), []
    other = replace(experiment, weights=(1.0, 4.5))
    sites = {
        k: build_site(one, k, trial=True) for k, one in enumerate((experiment, other))
    }
    with pytest.raises(FedbilevelError, match=r"clients \[1\] did not come"):
        serve(Loopback(sites), experiment, tmp_path, TERMS, report=told.append)
    assert any("node 1 is not taken: settings" in line for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["mean", "secure"])
def test_weights_are_those_of_the_simulator_and_of_the_replay(aggregate, tmp_path):
    # Samples of a site are alike: under masks it draws them by a secret.
    rows = settings("quadratic", noise="0", spread="0.5")
    experiment = replace(rows, weights=(1.0, 4.0), aggregate=aggregate)
    experiment.save(tmp_path)
    sites = {k: build_site(experiment, k, trial=True) for k in range(2)}
    result = serve(Loopback(sites), experiment, tmp_path, TERMS, report=ignore)
    deployed, outcome, algorithm = replay(tmp_path)
    simulated = experiment.run()
    point = algorithm.point(outcome.state.server)
    tolerance = 1e-11 if aggregate == "mean" else 1e-6
    for one in (point.y, simulated.point["y"]):
        np.testing.assert_allclose(deployed.point["y"], one, tolerance, tolerance)
    # And the weights matter.
    alike = replace(experiment, weights="equal").run()
    assert np.abs(alike.point["y"] - result.point["y"]).max() > 1e-3
    assert Experiment.load(tmp_path) == experiment


@pytest.mark.parametrize("text", ["1,x", "1,0", "1,,2", "nan,1", "1,2,3"])
def test_weights_on_the_command_line_are_checked(text):
    words = f"run quadratic --clients 2 --rounds 1 --weights {text}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2 and "weights" in done.output


def test_weights_on_the_command_line_are_read():
    for group in (EXPERIMENT, FEDERATED, federation._SERVED, node._NODE):
        assert "weights" in group.arguments
    made = EXPERIMENT.read(task="quadratic", settings=None, weights="1,2.5")
    assert made.weights == (1.0, 2.5)
    assert (
        EXPERIMENT.read(task="quadratic", settings=None, weights=None).weights is None
    )
    words = serving.deployment_of(replace(made, clients=2))
    assert all("--weights 1.0,2.5 " in line for line in words)
