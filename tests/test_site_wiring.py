"""What a server and its sites are started with reaches those that enforce it."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedbilevel.deployment import apps, serving
from fedbilevel.deployment.apps import Served
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.experiments import Experiment, federated, sites
from fedbilevel.experiments.agreement import SiteSteps
from fedbilevel.federation import Identity, SiteLimits, Terms
from fedbilevel.federation.signatures import KeyFiles
from tests.wiring import nothing, of, spy, told

# A node of Flower: what its operator configured, and the run of a server.

HELD = {"client": "1", "state": "state", "trial": "true"}
NODE = {
    **told("configure", precision="float32", cores=1),
    **of("build_site", clients=2),
    **told("build_site", client=1, trial=True, folder=Path("state"), holds=False),
    **told("build_site", report="print", seal="seal", identity=None, minimum=2),
    **told("build_site", tune=False),
    **told("build_site.limits", measure=None, max_exchanges=None, max_epsilon=None),
    **told("build_site.limits", largest_point=1e8, cohorts=None),
    **told("build_site.limits", minimum_batch=1, minimum_rows=1),
    **told("site_seal", client=1, keys=None),
}
KEYS = {"private_key": "key", "server_key": "server.pub"}


def configured(monkeypatch, **more):
    """Return what a site is built of by such a configuration of its node."""
    seen: dict = {}
    for name in ("configure", "build_site"):
        spy(monkeypatch, f"fedbilevel.deployment.apps.{name}", nothing, seen)
    spy(monkeypatch, "fedbilevel.deployment.apps.site_seal", lambda given: "seal", seen)
    place = "fedbilevel.deployment.apps.SiteIdentity.read"
    spy(monkeypatch, place, lambda given: "identity", seen)
    settings = {"task": "quadratic", "clients": 2, "options": {}, **more.pop("run", {})}
    apps._built(settings, {**HELD, **more})
    return {key: "print" if one is print else one for key, one in seen.items()}


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {}),
        ({"client": "0"}, {"build_site.client": 0, "site_seal.client": 0}),
        ({"trial": "no"}, {"build_site.trial": False}),
        ({"state": "other"}, {"build_site.folder": Path("other")}),
        ({"minimum": "3"}, {"build_site.minimum": 3}),
        ({"measure": "none"}, {"build_site.limits.measure": "none"}),
        ({"max_exchanges": "9"}, {"build_site.limits.max_exchanges": 9}),
        ({"max_epsilon": "2.5"}, {"build_site.limits.max_epsilon": 2.5}),
        ({"largest_point": "40"}, {"build_site.limits.largest_point": 40}),
        ({"largest_point": "1e6"}, {"build_site.limits.largest_point": 1e6}),
        ({"cohorts": "apart"}, {"build_site.limits.cohorts": "apart"}),
        ({"minimum_batch": "4"}, {"build_site.limits.minimum_batch": 4}),
        ({"minimum_rows": "5"}, {"build_site.limits.minimum_rows": 5}),
        # What is a site's own business comes from its operator, nothing else does.
        ({"data": "rows"}, {"build_site.experiment.options.data": "rows"}),
        ({"lr_x": "9"}, {}),
        (
            {"run": {"precision": "float64"}},
            {
                "configure.precision": "float64",
                "build_site.experiment.precision": "float64",
            },
        ),
    ],
)
def test_a_node_is_what_its_operator_configured(given, changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configured(monkeypatch, **given) == {**NODE, **changes}


def test_a_node_has_its_own_keys_and_those_of_the_other_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = {key: one for key, one in NODE.items() if key != "site_seal.keys"}
    keys = told("site_seal.keys", private=Path("key"), peers=(Path("server.pub"),))
    assert configured(monkeypatch, **KEYS) == {**wanted, **keys}
    known = configured(monkeypatch, **KEYS, site_keys=os.pathsep.join(("b", "a")))
    read = told("read", client=1, private=Path("key"), public=[Path("b"), Path("a")])
    identity = {"build_site.identity": "identity"}
    assert known == {**wanted, **keys, **read, **identity}


def test_an_error_of_before_is_forgotten_at_a_new_start(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "error.txt").write_text("of before")
    configured(monkeypatch, state=str(tmp_path / "state"))
    assert not (tmp_path / "state" / "error.txt").exists()


# The process of a server.

EXPERIMENT = Experiment("quadratic", clients=2, rounds=7, options={"lr_x": "1"})
TERMS = Terms(5.0, 2, 7.0, 50.0, ("print0", "print1"))


def served(folder, **more):
    given = {"terms": TERMS, **more}
    return Served(EXPERIMENT, folder, **given)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"keys": True},
        {"preparation": True},
        {"track": True},
        {"tuning": {"trials": 3, "rungs": 1, "rounds": 4}},
    ],
)
def test_a_server_is_told_all_that_is_served(more, tmp_path):
    paths = {
        "keys": KeyFiles(tmp_path / "key", (tmp_path / "0.pub", tmp_path / "1.pub")),
        "preparation": tmp_path / "made.json",
        "track": f"jsonl:{tmp_path / 'rounds'}",
    }
    more = {name: paths.get(name, value) for name, value in more.items()}
    one = served(tmp_path, **more)
    assert Served.read(one.config()) == one


SEARCH = {"trials": 3, "rungs": 1, "seeds": 5, "sampler": "even", "rounds": 4}


def run_of(monkeypatch, folder, one):
    """Return what the process of a server hands over."""
    seen: dict = {}
    tried: Any = SimpleNamespace()
    place = "fedbilevel.deployment.apps"
    spy(monkeypatch, f"{place}.configure", nothing, seen)
    spy(monkeypatch, f"{place}.server_seal", lambda given: "seal", seen)
    spy(monkeypatch, f"{place}.serve", nothing, seen)
    spy(monkeypatch, f"{place}.tune_at_sites", lambda given: tried, seen)
    spy(monkeypatch, f"{place}.read_preparation", lambda given: "made", seen)
    counts = lambda given: (given["experiment"], "sites count")  # noqa: E731
    spy(monkeypatch, f"{place}.counted", counts, seen)
    opened = lambda given: contextlib.nullcontext("kept")  # noqa: E731
    spy(monkeypatch, f"{place}.tracker", opened, seen)
    monkeypatch.setattr(apps, "GridTransport", lambda grid, halt: ("over", grid))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    context: Any = SimpleNamespace(run_config=one.config())
    grid: Any = "grid"
    apps._serve(grid, context)
    assert (folder / "server.pid").read_text() == str(os.getpid())
    return seen


def test_a_server_serves_what_it_was_told(tmp_path, monkeypatch):
    seen = run_of(monkeypatch, tmp_path, served(tmp_path))
    wanted = of("serve", clients=2, rounds=7)
    wanted |= told("serve", transport=("over", "grid"), folder=tmp_path)
    wanted["serve.experiment.options.lr_x"] = "1"
    wanted |= told("serve.terms", deadline=5.0, minimum=2, patience=7.0)
    wanted |= told("serve.terms", tolerance=50.0, keys=("print0", "print1"))
    wanted |= told("serve", preparation=None, on_round=None, steps=None, seal="seal")
    assert wanted.items() <= seen.items()
    assert (seen["configure.precision"], seen["configure.cores"]) == ("float32", 1)
    assert seen["serve.watch"] == "watch"
    assert (tmp_path / "server.log").read_text() == "Sites count.\n"
    assert not any(key.startswith(("tune_at_sites", "tracker")) for key in seen)


def test_a_server_has_its_preparation_tracker_search_and_keys(tmp_path, monkeypatch):
    rounds = f"jsonl:{tmp_path / 'rounds'}"
    more = {"preparation": tmp_path / "made.json", "track": rounds, "tuning": SEARCH}
    keys = KeyFiles(tmp_path / "key", (tmp_path / "0.pub",))
    seen = run_of(monkeypatch, tmp_path, served(tmp_path, keys=keys, **more))
    assert seen["read_preparation.path"] == str(tmp_path / "made.json")
    assert seen["counted.preparation"] == seen["serve.preparation"] == "made"
    assert (seen["tracker.text"], seen["tracker.resume"]) == (rounds, True)
    assert seen["tracker.about"] == EXPERIMENT.chosen()
    assert seen["serve.on_round"] == "kept"
    assert seen["server_seal.keys.private"] == tmp_path / "key"
    asked = {"trials": 3, "rungs": 1, "seeds": 5, "sampler": "even"}
    wanted = {**told("tune_at_sites.tuning", **asked), "tune_at_sites.rounds": 4}
    wanted |= told("tune_at_sites", seal="seal", folder=tmp_path)
    wanted |= told("tune_at_sites.terms", deadline=5.0, minimum=2)
    assert wanted.items() <= seen.items()
    assert seen["serve.steps"] == "watch"  # what the search returned


@pytest.mark.parametrize(("attempt", "enough"), [(1, 2), (2, 1)])
def test_all_sites_are_waited_for_at_first_and_the_fewest_later(
    attempt, enough, monkeypatch
):
    seen: dict = {}
    roster = SimpleNamespace(clients=2)

    def gather(seconds, enough):
        seen["gather"] = seconds, enough

    roster.gather = gather
    spy(monkeypatch, "fedbilevel.federation.Roster", lambda _: roster, seen)
    terms = Terms(patience=7.0, minimum=1)
    identity = Identity("f", "s", attempt)
    unused: Any = "over"
    seal: Any = "seal"
    weighing = replace(EXPERIMENT, weights=(1.0, 3.0))
    steps = SiteSteps({"lr": "2"}, seed=1)
    found = federated.gathered(
        unused,
        weighing,
        identity,
        terms,
        print,
        seal,
        steps,
    )
    assert found is roster and seen["gather"] == (7.0, enough)
    assert seen["Roster.clients"] == 2 and seen["Roster.weights"] == (1.0, 3.0)
    assert seen["Roster.identity.attempt"] == attempt
    assert seen["Roster.terms.patience"] == 7.0 and seen["Roster.seal"] == "seal"
    told_steps = {"steps": {"lr": "2"}, "seed": 1, "held_out": False}
    assert seen["Roster.steps"] == told_steps and seen["Roster.report"] is print


# A site.


def test_a_site_has_what_it_was_built_with(tmp_path, monkeypatch):
    seen: dict = {}
    spy(monkeypatch, "fedbilevel.federation.Site", lambda _: "site", seen)
    weighing = Experiment("quadratic", clients=3, weights=(1.0, 4.0, 2.0), rounds=9)
    unused: Any = "identity"
    sites.build_site(
        weighing,
        2,
        trial=True,
        folder=tmp_path,
        holds=False,
        seal="seal",  # type: ignore[arg-type]
        limits=SiteLimits(max_exchanges=9),
        identity=unused,
        minimum=3,
    )
    wanted = told("Site", client=2, folder=tmp_path, holds=False, seal="seal")
    wanted |= told("Site", identity="identity", minimum=3, largest_weight=4.0)
    wanted |= told("Site", follow=None, source=None)
    wanted |= told("Site.limits", max_exchanges=9, minimum_rows=1, measure=None)
    assert wanted.items() <= seen.items()
    assert float(seen["Site.job.data.weights"][0]) == 2.0
    assert seen["Site.facts"]["recommended"]["rounds"] == "9"


# The commands of a trial, and of a real deployment.


def link_at(folder, certificates=None):
    return SuperLink("127.0.0.1:9", folder, certificates)


def words_of(process):
    return process.command[process.command.index("node") :]


def test_a_node_of_a_trial_is_started_with_its_keys_and_place(tmp_path):
    keys = tmp_path / "keys"
    own = ["--private-key", f"{keys / '1'}", "--server-key", f"{keys / 'server.pub'}"]
    where = ["--client", "1", "--superlink", "127.0.0.1:9", "--trial", "--state"]
    where += [f"{tmp_path / 'nodes' / '1'}"]
    shared = ["node", *EXPERIMENT.arguments(shared=True)]
    made = serving.persistent_node(EXPERIMENT, 1, tmp_path, link_at(tmp_path))
    ends = ["--measure", "scalars"]
    assert words_of(made) == [*shared, *where, "--insecure", *own, *ends]
    safe = link_at(tmp_path, tmp_path / "c")
    made = serving.persistent_node(EXPERIMENT, 1, tmp_path, safe)
    trusts = ["--root-certificates", str(tmp_path / "c" / "ca.crt")]
    assert words_of(made) == [*shared, *where, *trusts, *own, *ends]
    # Under noise nothing is measured; under masks sites know each other.
    noisy = replace(EXPERIMENT, noise=1.0, clip=1.0)
    made = serving.persistent_node(noisy, 1, tmp_path, link_at(tmp_path))
    assert "--measure" not in made.command and "--site-key" not in made.command
    masked = replace(EXPERIMENT, aggregate="secure")
    made = serving.persistent_node(masked, 1, tmp_path, link_at(tmp_path))
    given = [f"{keys / f'{k}.pub'}" for k in range(2)]
    assert words_of(made)[-6:-2] == ["--site-key", given[0], "--site-key", given[1]]


def test_a_node_of_flower_is_configured_like_ours(tmp_path):
    masked = replace(EXPERIMENT, aggregate="secure")
    made = serving._stock(masked, 1, tmp_path, link_at(tmp_path))
    config = made.command[made.command.index("--node-config") + 1]
    keys = (tmp_path / "keys").resolve()
    others = [f"{keys / f'{k}.pub'}" for k in range(2)]
    assert config == " ".join(
        [
            'client=1 trial="true"',
            f"state={json.dumps(str(tmp_path.resolve() / 'nodes' / '1'))}",
            f"private_key={json.dumps(str(keys / '1'))}",
            f"server_key={json.dumps(str(keys / 'server.pub'))}",
            'measure="scalars"',
            f"site_keys={json.dumps(os.pathsep.join(others))}",
        ]
    )
    where = made.command.index("--superlink")
    assert made.command[where + 1] == "127.0.0.1:9" and "--insecure" in made.command
    assert made.error == tmp_path / "nodes" / "1" / "error.txt"


def test_a_trial_says_what_a_deployment_would_type():
    server, site = serving.deployment_of(EXPERIMENT)
    shared = "quadratic --clients 2 --set lr_x=1"
    assert server == (
        f"fedbilevel serve {shared} --address 127.0.0.1:8000 --certificates "
        "certificates --private-key server --node-key node0.pub ... --out RUN"
    )
    assert site == (
        f"fedbilevel node {shared} --client 0 --superlink SERVER:8443 "
        "--root-certificates ca.crt --private-key node0 --server-key server.pub "
        "--data ROWS --state STATE"
    )
    masked = replace(EXPERIMENT, aggregate="secure")
    server, site = serving.deployment_of(masked, tune=True)
    assert server.endswith("--out RUN --tune")
    assert "--server-key server.pub --site-key node0.pub ... --data ROWS" in site
    assert site.endswith("--state STATE --tune")


def test_a_trial_of_a_table_names_a_preparation_and_no_rows():
    of_table = Experiment(
        "regularization", clients=2, options={"data": "rows.csv", "label": "sick"}
    )
    for line in serving.deployment_of(of_table):
        assert "--clients 2 --preparation PREPARATION" in line
        assert "rows.csv" not in line and "sick" not in line
