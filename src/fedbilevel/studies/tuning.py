"""Tries algorithms that differ in numbers or counts, and takes the best.

Candidates that differ in numbers only are one compiled program, with all seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import numpy as np

from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import InvalidInputError, NonFiniteError, unknown_name
from fedbilevel.problem import Data, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import Sampling, Stopping, Watch
from fedbilevel.runtime.driver import NEVER
from fedbilevel.studies.seeds import swept
from fedbilevel.studies.setting import Setting

__all__ = ["Trial", "Tuned", "tune", "tuned"]


@dataclass(frozen=True)
class Trial:
    """A candidate, `algorithm`, and its mean headline over seeds, `value`.

    It is infinite if a seed diverged.
    """

    algorithm: AbstractAlgorithm
    value: float


@dataclass(frozen=True)
class Tuned:
    """The best `algorithm`, and all `trials`, in their order."""

    algorithm: AbstractAlgorithm
    trials: list[Trial]


def tune(
    problem: Problem,
    data: Data,
    start: tuple[Upper, Lower],
    candidates: Sequence[AbstractAlgorithm],
    *,
    rounds: int,
    seeds: Sequence[int],
    headline: str = "upper_loss",
    sampling: Sampling | None = None,
    metrics: Metrics | None = None,
    channel: Channel = PLAIN,
    measure_every: int | None = None,
    stopping: Stopping = NEVER,
    watch: Watch | None = None,
) -> Tuned:
    """Run every candidate from all seeds; take the one whose mean headline ends lowest.

    Measured is after the last round only, unless `measure_every` asks for more, as a
    stopping rule does.
    """
    drawn = sampling or Sampling()
    setting = Setting(problem, data, start, metrics, headline, drawn, channel)
    every = rounds if measure_every is None else measure_every
    more = {"measure_every": every, "stopping": stopping, "watch": watch}
    return tuned(setting, candidates, rounds, seeds, **more)


def tuned(
    setting: Setting,
    candidates: Sequence[AbstractAlgorithm],
    rounds: int,
    seeds: Sequence[int],
    **more: Any,
) -> Tuned:
    """Tune in a setting."""
    if not candidates or not seeds:
        raise InvalidInputError("tuning needs at least one candidate and one seed.")
    ends = np.full((len(candidates), len(seeds)), np.inf)
    first_error: NonFiniteError | None = None
    for group in _alike(candidates):
        many = [candidates[i] for i in group for _ in seeds]
        job = setting.job(many[0])
        try:
            several = [*seeds] * len(group)
            found = swept(job, rounds, many, several, **{"config": {}, **more})
        except NonFiniteError as error:  # of all runs
            first_error = first_error or error
            continue
        values = [_end(one, setting.headline) for one in found]
        ends[group] = np.reshape(values, (len(group), len(seeds)))
    if not np.isfinite(ends).any() and first_error is not None:
        raise first_error
    means = ends.mean(axis=1)
    trials = [Trial(*one) for one in zip(candidates, means.tolist(), strict=True)]
    return Tuned(candidates[int(np.argmin(means))], trials)


def _end(found: Result | NonFiniteError, headline: str) -> float:
    if isinstance(found, NonFiniteError):
        return np.inf
    if headline not in found.columns:
        raise unknown_name("headline", headline, found.columns)
    return float(found.columns[headline][-1])


def _alike(candidates: Sequence[AbstractAlgorithm]) -> list[list[int]]:
    """Group candidates that differ in numbers only."""
    groups: list[tuple[Any, list[int]]] = []
    for index, one in enumerate(candidates):
        static = eqx.filter(one, eqx.is_array, inverse=True)
        for other, members in groups:
            if eqx.tree_equal(static, other):
                members.append(index)
                break
        else:
            groups.append((static, [index]))
    return [members for _, members in groups]
