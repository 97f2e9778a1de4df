"""Common settings of a study's runs, and the place of their files."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import jax

from fedbilevel._folders import open_folder
from fedbilevel._schema import Settings
from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.problem import Data, Problem, split_start
from fedbilevel.runtime import Checkpoints, Job, Sampling, mesh
from fedbilevel.runtime.method_checks import check_method, require_method
from fedbilevel.runtime.server_seen import sees_server
from fedbilevel.studies.validation import HELD_OUT


@dataclass(frozen=True)
class Setting:
    """Everything of a run but its algorithm, its seed and its length.

    `start` is (x, y), `metrics(x, y)` adds columns, and `headline` names the column
    that decides which of two runs is better: the one where it ends lower. `tuned_by` is
    what decides between trials when tuning. Of models in the start only the arrays are
    kept here; the problem knows the rest.
    """

    problem: Problem
    data: Data
    start: tuple[Upper, Lower]
    metrics: Metrics | None = None
    headline: str = "upper_loss"
    sampling: Sampling = field(default_factory=Sampling)
    channel: Channel = PLAIN
    tuned_by: str = HELD_OUT

    def __post_init__(self) -> None:
        problem, start = split_start(self.problem, self.start)
        sampling = replace(self.sampling, batch=self.sampling.rows(self.data))
        object.__setattr__(self, "sampling", sampling)
        object.__setattr__(self, "problem", problem)
        object.__setattr__(self, "start", start)

    def job(self, algorithm: AbstractAlgorithm, seed: int = 0) -> Job:
        """Bind an algorithm, and check everything that can be checked."""
        job = Job.of(
            require_method(algorithm),
            self.problem,
            self.data,
            *self.start,
            metrics=self.metrics,
            seed=seed,
            sampling=self.sampling,
            channel=self.channel,
        )
        check_method(job)
        return job

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers in x and in y."""
        x, y = (sum(leaf.size for leaf in jax.tree.leaves(t)) for t in self.start)
        return x, y

    def headline_at_start(self) -> float | None:
        """Return the headline before the first round, where the metrics have it."""
        if self.metrics is None or sees_server(self.metrics):
            return None
        whole = self.problem.whole(*self.start)
        found = self.metrics(*whole, *self.problem.inputs).get(self.headline)
        return None if found is None else float(found)


@dataclass(frozen=True)
class Keeping:
    """Where a run keeps checkpoints and its result, `folder`, and how often it does.

    A checkpoint is due after `every_rounds` rounds or `every_seconds` seconds, None
    standing for never; one is always written in the end and on an interrupt. A run that
    the same call began in the folder continues, and in a new folder one starts; with
    `resume` True it must be there, with False it must not. `study` is the folder of the
    study that this is a part of, if it is one.
    """

    folder: Path | str
    resume: bool | None = None
    every_rounds: int | None = None
    every_seconds: float | None = Settings.checkpoint_seconds
    study: Path | str | None = None

    def __post_init__(self) -> None:
        _ = self.checkpoints  # which checks the numbers

    @property
    def checkpoints(self) -> Checkpoints:
        """Return the driver's settings of checkpoints."""
        return Checkpoints(Path(self.folder), self.every_rounds, self.every_seconds)

    def opened(self) -> Checkpoints:
        """Return the same, once it is sure that the run may use the folder."""
        mesh.on_first(lambda: open_folder(Path(self.folder), self.resume))
        return self.checkpoints

    def part(self, name: str) -> Checkpoints:
        """Return what the driver takes for one of several runs."""
        home = Path(self.folder)
        every = (self.every_rounds, self.every_seconds)
        return Checkpoints(home / name, *every, part_of=Path(self.study or home))
