"""A federation in one process: real packets, with a script for what goes wrong."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from fedbilevel.experiments import Experiment
from fedbilevel.federation import (
    FederationRuntime,
    Fingerprints,
    Identity,
    Roster,
    Site,
    Terms,
    algorithm_fingerprint,
    blind_job,
)
from fedbilevel.federation.wire import CHECKSUM, Seal
from fedbilevel.runtime import Job, Sampling

FEDERATION, SETTINGS = "f1", "settings"
_PROGRAMS: dict[int, dict] = {}
_JOBS: list[Job] = []
_MOST = 20_000  # packets of one test
TERMS = Terms(deadline=5.0, patience=1.0)


def site_job(job: Job, client: int) -> Job:
    """Return the job of one site: the rows of one client, and no others."""
    _JOBS.append(job)  # so that no other job gets its id
    alone = jax.tree.map(lambda leaf: leaf[client : client + 1], job.data)
    return eqx.tree_at(lambda one: one.data, job, alone)


def of_all_rows(job: Job) -> Job:
    """Return a job without batches: what sites draw under masks nobody can compute."""
    return replace(job, upper_batch=None, lower_batch=None)


def site_of(job: Job, client: int, folder: Path | None = None, **more) -> Site:
    """Return one client of a job as a site."""
    fingerprints = Fingerprints(SETTINGS, algorithm_fingerprint(job))
    facts = {"metrics": sorted(jax.eval_shape(job.measured, job.x, job.y))}
    more.setdefault("largest_weight", float(np.max(job.data.weights)))
    site = Site(
        site_job(job, client), client, fingerprints, facts=facts, folder=folder, **more
    )
    # Sites of one job run the same programs on other rows: compile them once.
    site.work.programs = _PROGRAMS.setdefault(id(job), {})
    return site


Script = Callable[[int, bytes, "Loopback"], bytes | None]


def faithful(node: int, packet: bytes, net: "Loopback") -> bytes | None:
    """Carry a packet to its node and the answer back."""
    return net.sites[node].handle(packet)


@dataclass
class Loopback:
    """Carries packets by calling the sites; `script` may lose or change them."""

    sites: dict[int, Site]
    script: Script = faithful
    sent: list[tuple[int, bytes, bytes | None]] = field(default_factory=list)
    notices: list[tuple[int, bytes]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # at the sites, if they report here
    lost: bool = False  # for scripts that cut a node off

    def nodes(self) -> set[int]:
        """Return the nodes that are there."""
        return set(self.sites)

    def key(self, node: int) -> str:
        """Return the name of a node's key."""
        return f"key{node}"

    def exchange(self, packets: Mapping[int, bytes], seconds, enough, largest):
        """Carry all packets; whoever answers does so in time."""
        del seconds, enough, largest
        assert len(self.sent) < _MOST, "the server asks for ever"
        came = {}
        for node, packet in packets.items():
            if b'"kind":"notice"' in packet:
                self.notices.append((node, packet))
                continue
            answer = self.script(node, packet, self)
            self.sent.append((node, packet, answer))
            if answer is not None:
                came[node] = answer
        return came


def _ignore(_) -> None:
    """Do nothing with what is told."""


def server_of(
    job: Job,
    net: Loopback,
    *,
    attempt: int = 1,
    terms: Terms = TERMS,
    report=_ignore,
    left_out=_ignore,
    seal: Seal = CHECKSUM,
):
    """Return the server of a federation; it is given no rows."""
    identity = Identity(FEDERATION, SETTINGS, attempt)
    weights = np.asarray(job.data.weights).tolist()
    roster = Roster(
        net, job.clients, identity, terms, report, weights=weights, seal=seal
    )
    roster.gather(terms.patience, enough=1)
    blind = blind_job(
        job.algorithm,
        (job.x, job.y),
        job.clients,
        job.key,
        sampling=Sampling(job.upper_batch, job.participants),
        private=job.private,
        channel=job.channel,
    )
    names = next(iter(roster.members.values())).facts["metrics"]
    return FederationRuntime(blind, roster, tuple(names), left_out)


def masked_patients(folder: Path) -> Experiment:
    """Write a table whose labels are noisy, and return how sites learn from it."""
    sites = ("north", "south", "west")
    draw = np.random.default_rng(3)
    with (folder / "patients.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["site", "age", "weight", "ill"])
        for number in range(240):
            age, weight = draw.normal(50, 9), draw.normal(70, 12)
            ill = (age - 50) / 9 - (weight - 70) / 24 + draw.logistic() > 0
            rows.writerow([sites[number % 3], age, weight, int(ill)])
    options = {"data": file.name, "label": "ill", "site": "site"}
    return Experiment(
        "regularization", aggregate="secure", precision="float64", options=options
    )
