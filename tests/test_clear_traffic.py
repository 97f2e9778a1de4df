"""Two data sets of the same shape: what a site sends in the clear is the same bytes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from fedbilevel import tasks
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Site, SiteLimits, Terms
from fedbilevel.federation.wire import unpack
from tests.federation import Loopback

TERMS = Terms(patience=1, deadline=60.0)
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 30.0, "force": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "secure": {"aggregate": "secure"},
    "measured": {"aggregate": "secure"},  # as the operators of sites allow
    "noise": NOISE,
    "both": {"aggregate": "secure", **NOISE},
    "robust": {"aggregate": "median", **NOISE},
    "coded": {"compress": "quantize:8", **NOISE},
    "plain": {},
}
OTHERS = ("measured", "robust", "coded", "plain")
FEW = ("cleaning", "few-shot", "regularization")
MASKED = ("secure", "measured", "both")
TABLES = ("cleaning", "fairness", "loss-tuning", "regularization", "representation")


def table(folder: Path, seed: int) -> str:
    """Write a table of one shape; its rows are larger for larger seeds."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(60, 4)) * (1 + seed)
    label = np.where(features[:, 0] + draw.normal(size=60) > 0, "ill", "well")
    group = np.where(draw.random(60) < 0.5, "a", "b")
    label[:2], group[:2] = ("ill", "well"), ("a", "b")
    lines = ["p,q,r,s,group,label"]
    for row, *names in zip(features.tolist(), group, label, strict=True):
        lines.append(",".join([*map(repr, row), *names]))
    path = folder / f"rows{seed}.csv"
    path.write_text("\n".join(lines))
    return str(path)


def at_server(task: str, privacy: str) -> Experiment:
    more = {"weights": (1, 1), "local_steps": 2, **OPTIONS[privacy]}
    batch = {} if task in ("two-client", "quadratic", "minimax") else {"batch": 8}
    return Experiment(task, "fedbio", clients=2, rounds=1, **batch, **more)


def site_of(
    experiment: Experiment, client: int, folder: Path, seed: int, limits: SiteLimits
) -> Site:
    """Return a site on a table of its own, or on its share of what a task draws."""
    place = folder / f"state{client}.{seed}"
    more: dict[str, Any] = {"folder": place, "report": print, "limits": limits}
    if experiment.task not in TABLES:
        site = build_site(experiment, client, trial=True, **more)
        rows = (site.work.job.data.upper, site.work.job.data.lower)
        upper, lower = jax.tree.map(lambda leaf: other(leaf, seed), rows)
        data = replace(site.work.job.data, upper=upper, lower=lower)
        site.work.job = replace(site.work.job, data=data)
        return site
    options = {"data": table(folder, seed), "label": "label"}
    if experiment.task == "fairness":
        options["group"] = "group"
    return build_site(replace(experiment, options=options), client, **more)


def other(leaf, seed: int):
    """Return other rows in the same shape; classes and places stay what they are."""
    return leaf * (1 + seed) + seed if np.issubdtype(leaf.dtype, np.floating) else leaf


def in_the_clear(answer: bytes, privacy: str) -> tuple:
    """Return all of an answer but masked words, replies, losses and conclusions."""
    header, listed, body = unpack(answer, 1 << 30)
    rest = bytes(body)
    if header.kind == "measure" or header.kind == "exchange" and privacy not in MASKED:
        rest = b""
    elif header.kind == "conclude":
        header = replace(header, info=None)
    elif header.kind == "exchange":
        kind, shape, _ = listed[0]
        rest = rest[np.dtype(kind).itemsize * int(np.prod(shape)) :]
    return header, listed, rest


def run_beside(task: str, privacy: str, folder: Path) -> list[tuple]:
    """Run with one site; another with the same keys and other rows answers beside."""
    experiment = at_server(task, privacy)
    limits = SiteLimits(measure="scalars" if privacy == "measured" else None)
    sites = [site_of(experiment, client, folder, 0, limits) for client in range(2)]
    beside = site_of(experiment, 0, folder, 7, limits)
    fixed = [
        eqx.filter(one.work.job, eqx.is_array, inverse=True)
        for one in (sites[0], beside)
    ]
    if eqx.tree_equal(*fixed):  # the same programs
        beside.work.programs = sites[0].work.programs
    seen = []

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        if node == 0:
            own, theirs = (Path(str(one.folder)) for one in (net.sites[0], beside))
            for name in own.glob("*.keys.json"):
                theirs.mkdir(exist_ok=True)
                if not (theirs / name.name).exists():
                    shutil.copy(name, theirs / name.name)
            clear = [in_the_clear(a, privacy) for a in (answer, beside.handle(packet))]
            seen.append(clear[0])
            assert clear[0] == clear[1]
        return answer

    (folder / "run").mkdir()
    net = Loopback(dict(enumerate(sites)), script)
    serve(net, experiment, folder / "run", TERMS, report=print)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("privacy", ["secure", "noise"])
def test_what_is_in_the_clear_does_not_depend_on_rows(tmp_path, privacy):
    seen = run_beside("two-client", privacy, tmp_path)
    assert {header.kind for header, *_ in seen} >= {"hello", "exchange"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "privacy"),
    [(task, one) for task in tasks.names() for one in ("noise", "secure", "both")]
    + [(task, one) for task in FEW for one in OTHERS],
)
def test_what_any_task_says_in_the_clear_does_not_depend_on_rows(
    tmp_path, task, privacy
):
    seen = run_beside(task, privacy, tmp_path)
    kinds = {header.kind for header, *_ in seen}
    masked = {"agree", "reveal"} if privacy in MASKED else set()
    measured = {"measure"} if privacy in ("measured", "plain") else set()
    assert kinds >= {"hello", "exchange"} | masked | measured
    assert "refused" not in kinds


@pytest.mark.parametrize(
    "privacy", ["secure", *(pytest.param(o, marks=pytest.mark.slow) for o in OTHERS)]
)
def test_rows_that_are_told_would_be_noticed(tmp_path, monkeypatch, privacy):
    """A site that says how large its reply is: the comparison must see it."""
    told = Site._reply

    def telling(self, header, leaves=()):
        if header.kind == "exchange":
            rows = jax.tree.leaves(self.work.job.data.upper)[0]
            header = replace(header, info={**header.info, "size": float(rows.sum())})
        return told(self, header, leaves)

    monkeypatch.setattr(Site, "_reply", telling)
    with pytest.raises(AssertionError):
        run_beside("two-client", privacy, tmp_path)
