"""A site of a named experiment: the rows of one client, and what it reports of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree, algorithms, datasets, federation
from fedbilevel.algorithms import Entry
from fedbilevel.channels import PLAIN, SecureMean
from fedbilevel.datasets import Preparation
from fedbilevel.datasets.encoding import read_preparation
from fedbilevel.errors import AtClientError, InvalidInputError
from fedbilevel.evaluation import NUMBERS
from fedbilevel.experiments import agreement
from fedbilevel.experiments.built import model_of_levels, reported_quality, weighing
from fedbilevel.experiments.clients import counted
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.served_model import alone_of, blank_task
from fedbilevel.experiments.tuning import search_of
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import CHECKSUM, Seal
from fedbilevel.problem import as_weights
from fedbilevel.result import to_plain
from fedbilevel.runtime import Job
from fedbilevel.studies.single import named_point
from fedbilevel.studies.validation import HELD_OUT, held_out
from fedbilevel.tasks import Task
from fedbilevel.tasks._base import Tested

if TYPE_CHECKING:
    from fedbilevel.federation.signatures import SiteIdentity

_EXCHANGES = 60  # of a method that sends second derivatives, at most


def build_site(
    experiment: Experiment,
    client: int,
    *,
    trial: bool = False,
    folder: Path | None = None,
    holds: bool = True,
    report: Callable[[str], None] = print,
    seal: Seal = CHECKSUM,
    limits: federation.SiteLimits | None = None,
    identity: "SiteIdentity | None" = None,
    minimum: int = 2,
    tune: bool = False,
) -> federation.Site:
    """Return client number `client` of the experiment, with its rows.

    The option `data` is where this site's own rows lie, and no others are read. In a
    `trial` it is data of all clients, partitioned as in a simulation, and this site
    takes its part. With `tune` it takes steps from the server, of those that a search
    may choose, and holds rows out where the server tries some. All else is as in
    `Site`.
    """
    clients = experiment.sites
    if not 2 <= minimum <= max(clients, 2):
        raise InvalidInputError(
            f"minimum={minimum}: a sum hides a reply among 2 sites or more, and there "
            f"are {clients}."
        )
    if not 0 <= client < clients:
        raise InvalidInputError(
            f"client {client}: the {clients} clients are numbered from 0."
        )
    place = None if trial else experiment.options.get("preparation")
    made = read_preparation(place) if place else None
    experiment, _ = counted(experiment, made)
    chosen = experiment.weights
    weights = as_weights(chosen if isinstance(chosen, tuple) else None, clients)
    settings = federation.settings_fingerprint(agreement.shared_settings(experiment))
    asked = experiment
    if tune:
        experiment.require_tunable()
        experiment = agreement.without_searched(experiment)
    task, values = _task(experiment, client, trial)
    task = weighing(task, [float(weights[client])])
    if made is not None:
        task = _as_prepared(task, experiment, client, made)
    named = experiment.algorithm_for(task)
    entry = agreement.federated_entry(named)
    try:
        job = _job(experiment, task, entry, clients)
    except AtClientError as error:
        # Alone, it is client 0.
        name = task.names[0] if trial and task.names else ""
        raise error.at(name, client) from error.__cause__
    if not trial:
        _check_rows(job)
    schema = _schema(task, job, algorithms.identity(named), values, experiment)
    if tune:
        schema = replace(schema, tuned_by=task.tuned_by or HELD_OUT)
    return federation.Site(
        job,
        client,
        federation.Fingerprints(settings, federation.algorithm_fingerprint(job)),
        facts=schema.plain(),
        folder=folder,
        holds=holds,
        conclude=_conclusion(task, job),
        report=report,
        seal=seal,
        limits=limits,
        identity=identity,
        minimum=minimum,
        largest_weight=float(weights.max()),
        follow=_following(asked, task, entry, job, client) if tune else None,
        source=None if trial else _source(experiment),
    )


def _source(experiment: Experiment) -> Path | None:
    """Return the file or folder that has the rows of a site, where there is one."""
    named = experiment.options.get("data")
    if not isinstance(named, str) or datasets.is_named(named):
        return None
    place = Path(named).expanduser()
    return place if place.exists() else None


def _job(experiment: Experiment, task: Task, entry: Entry, clients: int) -> Job:
    """Return the job of a client alone, with its rows.

    It is one of so many elsewhere: what depends on their number is checked on the
    server.
    """
    algorithm = experiment.algorithm_by(entry, task.recommended, clients)
    alone = replace(experiment, participants=None)
    job = alone.setting(task, entry, PLAIN).job(algorithm, experiment.seed)
    participants = experiment.participants or clients
    channel = experiment.channel().joined(algorithm.channel(), entry.name)
    channel = channel.shared_by(participants)
    return replace(job, clients=clients, participants=participants, channel=channel)


def _check_rows(job: Job) -> None:
    """Raise where sums of Hessians would say too much about the rows of a site.

    n rows of c numbers are n c unknowns. An exchange says D (D + 3)/2 numbers of the
    rows of each block, for D parameters, and those of a fold are a difference of two
    blocks. Rows are safe by counting while all exchanges say less than they hold.
    """
    if not job.algorithm.sends_hessian or isinstance(job.channel.reduction, SecureMean):
        return
    parts = jax.tree.leaves(job.y)[0].shape[0] if job.problem.separate else 1
    size = sum(leaf.size for leaf in jax.tree.leaves(job.y)) // parts
    # No row has more of its own than a model sees of it.
    row = min(size, sum(leaf[0, 0].size for leaf in jax.tree.leaves(job.data.lower)))
    folds = max(parts - 1, 1)
    needed = folds * _EXCHANGES * size * (size + 3) // (2 * row)
    if int(job.data.lower_sizes[0]) < needed:
        raise InvalidInputError(
            f"`{job.algorithm.title}` sends sums of second derivatives, from which the "
            f"rows of a site with fewer than {needed:,} could be found. Let the server "
            "and all sites take the secure mean (--aggregate secure), which hides "
            "them, or choose another method (--algorithm fedbio-controls)."
        )


def _following(
    experiment: Experiment, task: Task, entry: Entry, base: Job, client: int
) -> Callable[[Mapping[str, Any]], tuple[Job, Job | None]]:
    """Return how a site takes the steps of its server, or refuses them."""
    clients, usual = experiment.sites, task.recommended
    named = search_of(experiment, entry, usual, clients, experiment.method_options)

    def follow(info: Mapping[str, Any]) -> tuple[Job, Job | None]:
        given = agreement.SiteSteps.read(info)
        try:
            named.require_within(given.steps)
            algorithm = given.applied(experiment).algorithm_by(entry, usual, clients)
        except InvalidInputError as error:
            raise RefusedError("steps", str(error)) from error
        job = replace(base, algorithm=algorithm, key=jr.key(given.seed))
        if not given.held_out:
            return job, job
        kept, judged = held_out(base.data, client)
        if judged is None:
            return job, None
        return replace(job, data=kept), replace(job, data=judged, metrics=None)

    return follow


def _task(
    experiment: Experiment, client: int, trial: bool
) -> tuple[Task, dict[str, Any]]:
    """Build the task of one client: of its own rows, or of its share of all."""
    alone = experiment if trial else alone_of(experiment)
    task, values, _ = replace(alone, weights="task").build_task()
    known = task.data.clients
    if trial and known != experiment.sites:
        raise InvalidInputError(
            f"task '{experiment.label}' has {known} clients, not {experiment.sites}."
        )
    task = _share(task, client) if trial else task
    own = float(task.data.weights[0])
    if experiment.weights == "task" and own != 1:
        # Without one it weighs 1: the server would not know of another.
        raise InvalidInputError(
            f"task '{experiment.label}' gives client {client} the weight {own:g}, but "
            "in a federation the operator of the server decides what clients count. "
            "Give --weights, on the server and at all sites alike."
        )
    return task, values


def _share(task: Task, client: int) -> Task:
    """Return a task with the rows of one of its clients, also of those held out."""
    own = slice(client, client + 1)
    data, tested = jax.tree.map(lambda leaf: leaf[own], task.data), task.tested
    if tested is not None:
        dealt = np.arange(len(tested.label)) % task.data.clients
        mine = (dealt if tested.site is None else tested.site) == client
        tested = Tested(tested.features[mine], tested.label[mine], None)
    return replace(task, data=data, tested=tested, names=task.names[own])


def _as_prepared(
    task: Task, experiment: Experiment, client: int, made: Preparation
) -> Task:
    """Return a task with what is recommended to all sites, if its rows were counted.

    Recommended values may depend on how many rows a site has. Those of the site with
    most rows hold for all: server and sites know it from the preparation.
    """
    if len(made.sites) != experiment.sites:
        return task
    held = (task.origin.summary if task.origin else {}).get("table_rows")
    if held != made.sites[client]:
        raise InvalidInputError(
            f"the preparation counts {made.sites[client]} rows for client {client}, "
            "and the table of this site has another number. Give the table that was "
            "prepared, or prepare again at all sites, with the sums in the order of "
            "their clients."
        )
    known = blank_task(experiment, made)
    return replace(task, recommended=known.recommended, algorithm=known.algorithm)


def _schema(
    task: Task, job: Job, name: str, values: dict[str, Any], experiment: Experiment
) -> agreement.SiteSchema:
    """Return what the server must know of the task, which has no rows of its own."""
    own = agreement.local_options(experiment.task)
    prepared = bool(values.get("preparation"))
    # Recommended values may depend on the rows; chosen ones do not.
    sizes = experiment.sizes(task.recommended)
    usual = {**task.recommended, **sizes}
    chosen = {**usual, **experiment.options, **sizes}
    return agreement.SiteSchema(
        algorithm=name,
        recommended={option: str(chosen[option]) for option in usual},
        headline=task.headline,
        shows_point=task.shows_point,
        task={option: value for option, value in values.items() if option not in own},
        classes=federation.settings_fingerprint(agreement.meaning(task, prepared)),
        metrics=sorted(jax.eval_shape(job.measured, job.x, job.y)),
        concludes=_concludes(task),
        x=_tree.leaf_names(job.x),
        y=_tree.leaf_names(job.y),
        private=[
            [bool(flag) for flag in jax.tree.leaves(flags)]
            for flags in (job.private.x, job.private.y)
        ],
        alike=None if task.alike is None else dict(task.alike(task)),
        separate=job.problem.separate or None,
    )


def _concludes(task: Task) -> dict[str, str]:
    """Return the names of what a site may conclude with, which no row has a part in."""
    judges = task.predictor is not None and not task.predictor.advice
    return {**task.concludes, **dict.fromkeys(NUMBERS if judges else (), "number")}


def _conclusion(task: Task, job: Job) -> Callable[[PyTree], dict[str, Any]] | None:
    """Return how a site concludes a finished run from its rows; or None."""
    if not _concludes(task):
        return None
    conclude = task.conclusion

    def concluded(state: PyTree) -> dict[str, Any]:
        point = jax.tree.map(np.asarray, job.algorithm.point(state))
        leaves = named_point(point.x, point.y)
        found = {} if conclude is None else dict(conclude(task, leaves))
        model = model_of_levels(task, (point.x, point.y), {})
        found = to_plain({**found, **reported_quality(task, model)})
        # Values that are no numbers, such as a mean over nothing, are left out.
        return {name: value for name, value in found.items() if value is not None}

    return concluded
