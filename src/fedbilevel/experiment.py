"""A named task with a named algorithm: what the command line runs and resumes."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from fedbilevel import algorithms, channels, tasks
from fedbilevel._files import write_atomically
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import CheckpointError, HeterogeneityWarning, unknown_name
from fedbilevel.hypergradient import local_inverse_bias
from fedbilevel.problem.stored import sources
from fedbilevel.result import Result
from fedbilevel.run import DELTA, open_folder, run_job, run_seeds
from fedbilevel.runtime import Job, mesh
from fedbilevel.runtime.driver import Checkpoints, Watch
from fedbilevel.tasks._base import option_defaults

__all__ = ["Experiment", "headline_only"]

_FILE = "experiment.json"
_SIZES = ("rounds", "local_steps", "batch")
_CHANNEL = ("clip", "noise", "compress", "aggregate")
_TOLERATED_BIAS = 0.1  # of the hypergradient; noise of a sample is mostly larger


@dataclass(frozen=True)
class Experiment:
    """Names and numbers that fix a run. None leaves a choice to the task.

    `options` are parameters of the task or the algorithm, as text. `clip`, `noise`,
    `compress` and `aggregate` are read by `channels.read`; `delta` goes with the noise.
    """

    task: str
    algorithm: str | None = None
    clients: int | None = None
    participants: int | None = None
    rounds: int | None = None
    local_steps: int | None = None
    batch: int | None = None
    seed: int = 0
    runtime: str = "simulator"
    precision: str = "float32"
    measure_every: int = 1
    checkpoint_rounds: int | None = None
    checkpoint_seconds: float = 30.0
    clip: float | None = None
    noise: float = 0.0
    delta: float = DELTA
    compress: str | None = None
    aggregate: str = "mean"
    options: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        folder: Path | None = None,
        *,
        resume: bool = False,
        watch: Watch | None = None,
    ) -> Result:
        """Build task and algorithm, run, and return the result.

        `watch` is shown the task's headline metric only.
        """
        task, job, config = mesh.on_all(self.job)
        keeper = None
        if folder is not None:
            mesh.on_first(lambda: open_folder(folder, resume))
            every = (self.checkpoint_rounds, self.checkpoint_seconds)
            keeper = Checkpoints(folder, *every)
            mesh.on_first(lambda: self.save(folder))
        result = run_job(
            job,
            config.pop("rounds"),
            measure_every=self.measure_every,
            runtime=self.runtime,
            keeper=keeper,
            watch=headline_only(watch, task.headline),
            task=self.task,
            config={**config, "seed": self.seed},
            delta=self.delta,
        )
        result = self._named(task, result)
        if folder is not None:
            mesh.on_first(lambda: result.save(folder))
        return result

    def run_seeds(self, count: int) -> list[Result]:
        """Run from `count` random seeds, the experiment's own first, as one program."""
        task, job, config = self.job()
        results = run_seeds(
            job,
            config.pop("rounds"),
            range(self.seed, self.seed + count),
            measure_every=self.measure_every,
            task=self.task,
            config=config,
            delta=self.delta,
        )
        return [self._named(task, result) for result in results]

    def job(self) -> tuple[tasks.Task, Job, dict[str, Any]]:
        """Build task and algorithm; return them with the settings to record."""
        channel = self.channel()  # before any data are loaded
        task, algorithm, sizes, values = self._build()
        shared = {"participants": self.participants, "channel": channel}
        job = self.job_on(task, algorithm, **shared)
        if task.convex:
            _warn_if_biased(self.algorithm_for(task), job)
        chosen = {name: sizes[name] for name in ("rounds", "local_steps")}
        chosen |= self.channel_settings()
        return task, job, {**chosen, "task": values, "headline": task.headline}

    def job_on(
        self, task: tasks.Task, algorithm: AbstractAlgorithm, **more: Any
    ) -> Job:
        """Return the job of an algorithm on the rows of a task."""
        return Job.of(
            algorithm,
            task.problem,
            task.data,
            task.x,
            task.y,
            metrics=task.metrics,
            seed=self.seed,
            batch=self.sizes(task.recommended)["batch"],
            private=task.private,
            **more,
        )

    def channel(self) -> channels.Channel:
        """Return what replies go through."""
        return channels.read(**{name: getattr(self, name) for name in _CHANNEL})

    def channel_settings(self) -> dict[str, Any]:
        """Return what of the channel is not as if it was left out."""
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        names = (*_CHANNEL, "delta") if self.noise else _CHANNEL
        values = {name: getattr(self, name) for name in names}
        return {
            name: value
            for name, value in values.items()
            if name == "delta" or value != defaults[name]
        }

    def _named(self, task: tasks.Task, result: Result) -> Result:
        shown = result.point if task.shows_point else {}
        point = {name: leaf.tolist() for name, leaf in shown.items()}
        more = {} if task.conclusion is None else task.conclusion(task, result.point)
        final = {**result.final, **point, **more}
        return dataclasses.replace(
            result, algorithm=self.algorithm_for(task), final=final
        )

    def algorithm_for(self, task: tasks.Task) -> str:
        """Return the algorithm that was chosen, or the task's own."""
        return self.algorithm or task.algorithm

    def build_task(self) -> tuple[tasks.Task, dict[str, Any], dict[str, str]]:
        """Build the task; return it with its options, and those that are not its."""
        make = tasks.find(self.task)
        for_task, rest = self._split_options(option_defaults(make))
        values = tasks.read_options(make, for_task)
        task = make(**values) if self.clients is None else make(self.clients, **values)
        return task, values, rest

    def _build(
        self,
    ) -> tuple[tasks.Task, AbstractAlgorithm, dict[str, int], dict[str, Any]]:
        tasks.find(self.task)
        if self.algorithm is not None:
            algorithms.find(self.algorithm)  # before any data are loaded
        task, values, _ = self.build_task()
        sizes = self.sizes(task.recommended)
        return task, self.build_algorithm(task), sizes, values

    def sizes(self, recommended: Mapping[str, str]) -> dict[str, int]:
        """Return rounds, local steps and batch: chosen, or else recommended."""
        chosen = {name: getattr(self, name) for name in _SIZES}
        return {
            name: int(recommended[name]) if value is None else value
            for name, value in chosen.items()
        }

    def build_algorithm(self, task: tasks.Task) -> AbstractAlgorithm:
        """Build the algorithm for a task that was built already."""
        name = self.algorithm_for(task)
        return self.algorithm_named(name, task.recommended, task.data.clients)

    def algorithm_named(
        self, name: str, recommended: Mapping[str, str], clients: int
    ) -> AbstractAlgorithm:
        """Build an algorithm from what a task recommends and what was chosen."""
        kind = algorithms.find(name)
        known = option_defaults(tasks.find(self.task))
        _, options = self._split_options(known)
        for option in options:
            if option not in kind.option_names():
                raise unknown_name("option", option, [*known, *kind.option_names()])
        steps = self.sizes(recommended)["local_steps"]
        settings = {"warm_start": "0", **recommended, **options}
        for size in _SIZES:
            settings.pop(size, None)
        return kind.from_options(settings, clients, steps)

    @staticmethod
    def load(folder: Path) -> "Experiment":
        """Read the experiment of a run folder."""
        path = folder / _FILE
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no {_FILE}: no run of `fedbilevel run` began there."
            )
        try:
            return Experiment(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error

    def save(self, folder: Path) -> None:
        """Write the experiment into a run folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_atomically(folder / _FILE, lambda file: file.write(text.encode()))

    def _split_options(self, task_options):
        for_task = {n: v for n, v in self.options.items() if n in task_options}
        rest = {n: v for n, v in self.options.items() if n not in task_options}
        return for_task, rest


def headline_only(watch: Watch | None, headline: str) -> Watch | None:
    """Return a watch that is shown one metric alone."""
    if watch is None:
        return None

    def show(done: int, total: int, newest: dict[str, float]) -> None:
        watch(done, total, {n: v for n, v in newest.items() if n == headline})

    return show


def _warn_if_biased(name: str, job: Job) -> None:
    """Warn where averaging the clients' own inverse Hessians leads elsewhere."""
    data = job.data
    private = any(jax.tree.leaves(job.private))
    # Every row is read many times: too slow where rows are left in a file.
    unseen = private or sources((data.upper, data.lower))
    if not job.algorithm.inverts_locally or unseen or data.clients == 1:
        return
    bias = float(local_inverse_bias(job.problem, job.data, job.x, job.y))
    if not bias > _TOLERATED_BIAS:  # NaN, from a lower level without curvature, is not
        return
    kinds = {other: algorithms.find(other) for other in algorithms.names()}
    shared = AbstractAlgorithm.answers
    unbiased = [
        other
        for other, kind in kinds.items()
        if kind.answers == shared and not kind.inverts_locally
    ]
    warnings.warn(
        f"{name} inverts each client's own Hessian, but these clients' data differ: "
        f"near the start the averaged hypergradient is {bias:.0%} off the true one, so "
        f"the limit will be off, too. Unbiased: {', '.join(unbiased)}.",
        HeterogeneityWarning,
        stacklevel=2,
    )
