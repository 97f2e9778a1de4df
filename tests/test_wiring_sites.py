"""Every option of `federate`, `serve` and `node` reaches the sites' side or the server.

As in `test_wiring`, what is passed on stands here whole, by hand.
"""

from pathlib import Path

import pytest

from fedbilevel.cli.federation import _folder_of_trial
from fedbilevel.errors import InvalidInputError
from tests.wiring import (
    GONE,
    TUNING,
    Case,
    a_watch,
    checks_of,
    nothing,
    of,
    passed_on,
    same,
    shared,
    told,
    uncovered,
)

TRIAL = {**TUNING, "rounds": 10}  # of a search at sites, which has no rungs
TRIED = ("trials", "tuning_seeds", "sampler")
OWN = {"client_states": None, "preparation": None}
SERVING = {
    "fedbilevel.cli.federation.watched": a_watch,
    "fedbilevel.cli.federation.show_result": nothing,
    "fedbilevel.cli.federation._say": nothing,
    "fedbilevel.tracking.check_tracking": nothing,
    "fedbilevel.experiments.Experiment.save": nothing,
}
FEDERATING = {
    **SERVING,
    "fedbilevel.runtime.configure": nothing,
    "fedbilevel.experiments.theory.follow_file": same("experiment"),
    "fedbilevel.experiments.agreement.sized_here": same("experiment"),
    "fedbilevel.experiments.agreement.counted_here": lambda given: (
        given["experiment"],
        "words",
    ),
    "fedbilevel.deployment.serving.deployment_of": lambda given: ["deployed"],
    "fedbilevel.deployment.serving.federate": lambda given: "found",
}
SERVES = {
    **SERVING,
    "fedbilevel.datasets.encoding.read_preparation": lambda given: "made",
    "fedbilevel.experiments.served_model.blank_task": nothing,
    "fedbilevel.experiments.clients.counted": lambda given: (given["experiment"], ""),
    "fedbilevel.experiments.run_folder.require_served_again": nothing,
    "fedbilevel.deployment.serving.serve_over_flower": lambda given: "found",
}
NODES = {
    "fedbilevel.runtime.configure": nothing,
    "fedbilevel.experiments.sites.build_site": lambda given: "site",
    "fedbilevel.federation.signatures.site_seal": lambda given: "seal",
    "fedbilevel.federation.signatures.SiteIdentity.read": lambda given: "identity",
    "fedbilevel.cli.node._take_part": nothing,
}
WATCHED = {
    **told("watched", title="quadratic", quiet=False, alone=False),
    **told("show_result", result="found", folder=Path("out"), as_json=False),
}
FEDERATE = {
    **WATCHED,
    **told("configure", precision="float32", cores=None),
    **{
        key: one
        for name in ("sized_here", "counted_here", "deployment_of", "save")
        for key, one in of(name).items()
    },
    **told("save", folder=Path("out")),
    **told("deployment_of", tune=False),
    **told("_say", text="Words."),
    **of("federate.served"),
    **told("federate.served", folder=Path("out"), keys=None, preparation=None),
    **told("federate.served", track=None, tuning=None),
    **told("federate.served.terms", deadline=60.0, minimum=1, patience=600.0),
    **told("federate.served.terms", tolerance=1e3, keys=()),
    **told("federate", nodes="persistent", watch="watch", say="say", about="stage"),
}
SERVER = "serve_over_flower"
SERVE = {
    **WATCHED,
    **of("counted", clients=2),
    **told("counted", preparation=None),
    **of("require_served_again", clients=2),
    **told("require_served_again", folder=Path("out")),
    **of("save", clients=2),
    **told("save", folder=Path("out")),
    **of(f"{SERVER}.served", clients=2),
    **told(f"{SERVER}.served", folder=Path("out"), preparation=None, track=None),
    **told(f"{SERVER}.served", tuning=None),
    **told(f"{SERVER}.served.keys", private=Path("key")),
    **told(f"{SERVER}.served.keys", peers=(Path("0.pub"), Path("1.pub"))),
    **told(f"{SERVER}.served.terms", deadline=600.0, minimum=1, patience=86400.0),
    **told(f"{SERVER}.served.terms", tolerance=1e3, keys=()),
    **told(f"{SERVER}.link", address="127.0.0.1:8000", folder=Path("out")),
    **told(f"{SERVER}.link", certificates=Path("certificates"), remembers=True),
    **told(SERVER, watch="watch", say="say", about="stage", crowd=()),
}
SITE = {
    **told("configure", precision="float32", cores=1),
    **of("build_site", clients=2),
    **told("build_site.experiment.options", data="rows"),
    **told("build_site", client=0, trial=False, folder=Path("state"), holds=True),
    **told("build_site", report="once", seal="seal", identity=None, minimum=2),
    **told("build_site", tune=False),
    **told("build_site.limits", measure=None, max_exchanges=None, max_epsilon=None),
    **told("build_site.limits", largest_point=1e8, cohorts=None),
    **told("build_site.limits", minimum_batch=1, minimum_rows=1),
    **told("site_seal", client=0),
    **told("site_seal.keys", private=Path("key"), peers=(Path("server.pub"),)),
    **told("_take_part", site="site"),
    **told("_take_part.link", superlink="server:1", patience=86400.0),
    **told("_take_part.link", root_certificates=Path("ca"), private_key=Path("key")),
}
TRUSTED = "--root-certificates ca --private-key key --server-key server.pub"
NODE = "node quadratic --clients 2 --client 0 --superlink server:1 --state state"
SAFE = "--certificates certificates --private-key key"
PEERS = "--node-key 0.pub --node-key 1.pub"
QUIET = {"watched.quiet": True, "show_result.as_json": True}
TERMS = {
    "deadline": ("--deadline 5", {"terms.deadline": 5.0}),
    "minimum": ("--minimum 2", {"terms.minimum": 2}),
    "patience": ("--patience 7", {"terms.patience": 7.0}),
    "tolerance": ("--tolerance 50", {"terms.tolerance": 50.0}),
}
SEARCHES = {
    "trials": ("--trials 21", {"served.tuning": {**TRIAL, "trials": 21}}),
    "tuning_seeds": ("--tuning-seeds 5", {"served.tuning": {**TRIAL, "seeds": 5}}),
    "sampler": ("--sampler even", {"served.tuning": {**TRIAL, "sampler": "even"}}),
    "trial_rounds": ("--trial-rounds 4", {"served.tuning": {**TRIAL, "rounds": 4}}),
}
TRACK = {
    **told("check_tracking", text="jsonl:rounds", resume=False),
    "served.track": "jsonl:rounds",
}
CASES = {
    "federate": Case(
        "federate quadratic --out out",
        FEDERATING,
        FEDERATE,
        {
            **shared("federate"),
            **TERMS,
            "task": (
                "federate minimax --out out",
                {"experiment.task": "minimax", "watched.title": "minimax"},
            ),
            "nodes": ("--nodes stock", {"federate.nodes": "stock"}),
            "out": ("--out other", {"folder": Path("other")}),
            "track": ("--track jsonl:rounds", TRACK),
            "as_json": (
                "--json",
                {
                    **QUIET,
                    "_say.text": GONE,
                    **dict.fromkeys(of("deployment_of"), GONE),
                    "deployment_of.tune": GONE,
                },
            ),
        },
    ),
    "federate --tune": Case(
        "federate quadratic --out out --tune",
        FEDERATING,
        {**FEDERATE, "deployment_of.tune": True, "federate.served.tuning": TRIAL},
        {"tune": ("", {}), **SEARCHES},
    ),
    "federate --plan": Case(
        "federate quadratic --out out --plan plan.json",
        FEDERATING,
        {**FEDERATE, **of("follow_file"), "follow_file.path": Path("plan.json")},
        {"plan": ("", {})},
    ),
    "serve": Case(
        f"serve quadratic --clients 2 --out out {SAFE} {PEERS}",
        SERVES,
        SERVE,
        {
            **shared("serve"),
            **TERMS,
            "preparation": ("", {}),  # has a line of its own below
            "precision": (
                "--precision float64",
                {"experiment.precision": "float64"},
            ),
            "task": (
                f"serve minimax --clients 2 --out out {SAFE} {PEERS}",
                {"experiment.task": "minimax", "watched.title": "minimax"},
            ),
            "clients": (
                "--clients 3 --node-key 2.pub",
                {
                    "experiment.clients": 3,
                    "keys.peers": (Path("0.pub"), Path("1.pub"), Path("2.pub")),
                },
            ),
            "out": ("--out other", {"folder": Path("other")}),
            "address": ("--address here:9", {"link.address": "here:9"}),
            "certificates": ("--certificates c", {"link.certificates": Path("c")}),
            "private_key": ("--private-key k", {"keys.private": Path("k")}),
            "node_key": (
                f"serve quadratic --clients 2 --out out {SAFE} --node-key b "
                "--node-key a",
                {"keys.peers": (Path("b"), Path("a"))},
            ),
            "track": ("--track jsonl:rounds", TRACK),
            "as_json": ("--json", QUIET),
        },
    ),
    "serve --insecure": Case(
        "serve quadratic --clients 2 --out out --insecure",
        SERVES,
        {
            **{key: one for key, one in SERVE.items() if "served.keys" not in key},
            f"{SERVER}.served.keys": None,
            f"{SERVER}.link.certificates": None,
        },
        {"insecure": ("", {})},
    ),
    "serve --preparation": Case(
        f"serve quadratic --clients 2 --out out {SAFE} {PEERS} --preparation p.json",
        SERVES,
        {
            **SERVE,
            "read_preparation.path": "p.json",
            "counted.preparation": "made",
            **of("blank_task", clients=2),
            "blank_task.preparation": "made",
            f"{SERVER}.served.preparation": Path("p.json"),
        },
        {"preparation": ("", {})},
    ),
    "serve --tune": Case(
        f"serve quadratic --clients 2 --out out {SAFE} {PEERS} --tune",
        SERVES,
        {**SERVE, f"{SERVER}.served.tuning": TRIAL},
        {"tune": ("", {}), **SEARCHES},
    ),
    "node": Case(
        f"{NODE} {TRUSTED} --data rows",
        NODES,
        SITE,
        {
            **shared("node"),
            "task": (
                NODE.replace("quadratic", "minimax") + f" {TRUSTED} --data rows",
                {"experiment.task": "minimax"},
            ),
            "data": ("--data others", {"experiment.options.data": "others"}),
            "client": ("--client 1", {"client": 1}),
            "superlink": ("--superlink there:2", {"link.superlink": "there:2"}),
            "state": ("--state kept", {"build_site.folder": Path("kept")}),
            "root_certificates": (
                "--root-certificates c",
                {"link.root_certificates": Path("c")},
            ),
            "private_key": (
                "--private-key k",
                {"keys.private": Path("k"), "link.private_key": Path("k")},
            ),
            "server_key": ("--server-key s", {"keys.peers": (Path("s"),)}),
            "site_key": (
                "--aggregate secure --site-key b --site-key a",
                {
                    "experiment.aggregate": "secure",
                    "build_site.identity": "identity",
                    **told("read", client=0, private=Path("key")),
                    "read.public": [Path("b"), Path("a")],
                },
            ),
            "minimum": ("--minimum 3", {"build_site.minimum": 3}),
            "patience": ("--patience 5", {"link.patience": 5.0}),
            "trial": ("--trial", {"build_site.trial": True}),
            "tune": ("--tune", {"build_site.tune": True}),
            "cores": ("--cores 3", {"configure.cores": 3}),
            "measure": ("--measure scalars", {"limits.measure": "scalars"}),
            "max_exchanges": ("--max-exchanges 9", {"limits.max_exchanges": 9}),
            "max_epsilon": ("--max-epsilon 2.5", {"limits.max_epsilon": 2.5}),
            "largest_point": ("--largest-point 40", {"limits.largest_point": 40.0}),
            "cohorts": ("--cohorts apart", {"limits.cohorts": "apart"}),
            "minimum_batch": ("--minimum-batch 4", {"limits.minimum_batch": 4}),
            "minimum_rows": ("--minimum-rows 6", {"limits.minimum_rows": 6}),
        },
    ),
    # Flower would take a node with a key of one's own for an unknown one.
    "node --insecure": Case(
        f"{NODE} --insecure --data rows",
        NODES,
        {
            **{key: one for key, one in SITE.items() if "site_seal.keys" not in key},
            "site_seal.keys": None,
            **told("_take_part.link", root_certificates=None, private_key=None),
        },
        {"insecure": ("", {})},
    ),
    "node --insecure with keys": Case(
        f"{NODE} --insecure --data rows --private-key key --server-key server.pub",
        NODES,
        {
            **SITE,
            **told("_take_part.link", root_certificates=None, private_key=None),
        },
        {"insecure": ("", {})},
    ),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


(
    test_without_options_a_command_passes_on_its_defaults,
    test_an_option_changes_what_it_is_for_and_nothing_else,
) = checks_of(CASES)


@pytest.mark.parametrize("command", ["federate", "serve", "node"])
def test_every_option_has_a_row(command):
    assert not uncovered(CASES, command)


def test_a_trial_without_a_folder_leaves_none(monkeypatch):
    case = CASES["federate"]._replace(line="federate quadratic")
    found = passed_on(case, "", monkeypatch)
    assert not found["federate.served.folder"].exists()
    assert found["show_result.folder"] is None


def test_a_folder_stays_once_a_round_is_kept(tmp_path):
    for kept in (False, True):
        folder = tmp_path / str(kept)
        folder.mkdir()
        with pytest.raises(InvalidInputError), _folder_of_trial(folder):
            if kept:
                (folder / "checkpoint.npz").touch()
            raise InvalidInputError("a mistake.")
        assert folder.exists() == kept
