"""Draws what a method of the FedNest family will draw, as its listings take it."""

from collections.abc import Callable
from typing import Any

from fedbilevel.runtime import Job, keys
from tests.reference.replay_phases import bundle_of, draw_phase, phase_number, xi, zeta


def draw_rounds(job: Job, rounds: int) -> list[tuple[Any, Any]]:
    """Return, for each round, the samples of T_in inner calls and of the outer one."""
    algorithm: Any = job.algorithm
    T_in = algorithm.inner_rounds
    below = _anchored_inner if algorithm.anchored else _light_inner
    inner = below(job, rounds * T_in)
    outer = draw_fed_out if hasattr(algorithm, "terms") else _light_out
    return [
        (inner[r * T_in : (r + 1) * T_in], samples)
        for r, samples in enumerate(outer(job, rounds))
    ]


def lengths(job: Job, rounds: int) -> list[int]:
    """Return the number of factors N' of the series in each round."""
    algorithm: Any = job.algorithm
    if not algorithm.random_length:
        return [algorithm.terms] * rounds
    where = (job.key, keys.ROUNDS, phase_number(job, "series_factor"))
    most = algorithm.terms - 1
    return [int(keys.draw_length(*where, r, most)) for r in range(rounds)]


def _anchored_inner(job: Job, calls: int):
    anchors = draw_phase(job, "inner_anchor", calls, zeta)
    steps = draw_walks(job, "inner_correct", calls, zeta)
    return [
        [
            (client[call], zetas)
            for client, zetas in zip(anchors, steps[call], strict=True)
        ]
        for call in range(calls)
    ]


def _light_inner(job: Job, calls: int):
    return draw_walks(job, "inner_local", calls, zeta)


def _light_out(job: Job, rounds: int):
    return draw_walks(job, "outer_local", rounds, bundle_of(job))


def draw_fed_out(job: Job, rounds: int):
    """Return, for each round, the samples of the series and of the upper update."""
    algorithm: Any = job.algorithm
    most = algorithm.terms - 1 if algorithm.random_length else algorithm.terms
    first = draw_phase(job, "series_start", rounds, xi)
    factors = draw_phase(job, "series_factor", rounds * most, zeta)
    outer = draw_outer_steps(job, rounds)
    return [
        (
            [client[r] for client in first],
            [[client[r * most + m] for client in factors] for m in range(length)],
            *outer[r],
        )
        for r, length in enumerate(lengths(job, rounds))
    ]


def draw_outer_steps(job: Job, rounds: int):
    """Return, for each round, the samples of the hypergradient and of the steps."""
    # The anchor takes two keys a round: one for xi, one for zeta.
    uppers = draw_phase(job, "outer_anchor", 2 * rounds, xi)
    lowers = draw_phase(job, "outer_anchor", 2 * rounds, zeta)
    steps = draw_walks(job, "outer_correct", rounds, xi)
    return [
        (
            [(u[2 * r], v[2 * r + 1]) for u, v in zip(uppers, lowers, strict=True)],
            steps[r],
        )
        for r in range(rounds)
    ]


def draw_walks(job: Job, phase: str, calls: int, draw: Callable):
    """Return, for each call of a phase, what every client draws in its tau parts."""
    tau: int = job.algorithm.local_steps  # pyright: ignore[reportAttributeAccessIssue]
    drawn = draw_phase(job, phase, calls * tau, draw)
    return [
        [client[call * tau : (call + 1) * tau] for client in drawn]
        for call in range(calls)
    ]
