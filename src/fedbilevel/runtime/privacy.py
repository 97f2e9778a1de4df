"""How much a run with noise reveals of a client: the accountant, asked for a job."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from fedbilevel.channels import Privacy, count_blocks, vector_shapes
from fedbilevel.channels.accountant import epsilon, epsilon_of_events
from fedbilevel.runtime.counts import Ledger
from fedbilevel.runtime.exchange import links_of, start_kept
from fedbilevel.runtime.job import ABSENT, Job, Where


def noisy(job: Job) -> Privacy | None:
    """Return what adds noise to what clients send, if anything does."""
    privacy = job.channel.privacy
    return privacy if privacy is not None and float(privacy.noise) else None


def is_noisy(job: Job) -> bool:
    """Say whether clients add noise to what they send."""
    return noisy(job) is not None


def blocks_of(job: Job) -> dict[Where, int]:
    """Return the blocks of a reply in every phase, by its stage and number."""
    return {where: count_blocks(link.like) for where, link in links_of(job).items()}


def privacy_spent(job: Job, ledger: Ledger, rounds: int) -> dict[str, float]:
    """Return epsilon and delta of a run of so many rounds; nothing without noise."""
    privacy = noisy(job)
    if privacy is None:
        return {}
    blocks = ledger.blocks(job.key, rounds)
    participants, present = privacy.participants, None
    if job.attendance is not None:
        rows = np.asarray(job.attendance)[: len(blocks)]
        present = (rows > ABSENT).sum(axis=1)
    added_up = _adds_up(job)
    if not added_up:
        present = np.ones_like(blocks)
    # Drawing a cohort protects clients that keep nothing between exchanges. Replies of
    # others depend on when they were drawn before, which no bound here covers.
    forgets = not jax.tree.leaves(start_kept(job))
    everyone = any(phase.everyone for phase in job.every_phase().values())
    drawn = forgets and added_up and not everyone
    clients = job.clients if drawn else participants
    sent = blocks > 0
    found = epsilon(
        float(privacy.noise),
        blocks[sent],
        int(sent.sum()),
        participants,
        clients,
        privacy.delta,
        None if present is None else present[sent],
    )
    return {"epsilon": found, "delta": privacy.delta}


class NoiseForecast(NamedTuple):
    """The most that the signal of a run can be, in units of the noise in it.

    The mean over n participants has a norm of at most the clip C. Its noise has the
    deviation S C / n in every coordinate, so a norm of about S C sqrt(d) / n in a block
    of d: `each` is n / (S sqrt(d)) for the largest block. Over E exchanges changes that
    agree add up to E C, and noise to sqrt(E) times that of one: `whole` is sqrt(E)
    times `each`. No data are looked at: a clip that is never reached leaves less.
    """

    participants: int
    size: int
    exchanges: int
    each: float

    @property
    def whole(self) -> float:
        """The ratio after all exchanges."""
        return math.sqrt(self.exchanges) * self.each

    def __str__(self) -> str:
        return (
            f"the signal of {self.participants} sites is at most {self.each:.2g} of "
            f"the noise in an exchange, in a block of {self.size} numbers, and at most "
            f"{self.whole:.2g} of it over {self.exchanges} exchanges"
        )


def noise_forecast(job: Job, rounds: int) -> NoiseForecast | None:
    """Say before a run what its noise will leave; None without noise."""
    privacy = noisy(job)
    if privacy is None:
        return None
    shapes = [link.like for link in links_of(job).values()]
    size = max(block.size for tree in shapes for block in vector_shapes(tree))
    exchanges = int((Ledger(job).blocks(job.key, rounds) > 0).sum())
    each = privacy.participants / (float(privacy.noise) * math.sqrt(size))
    return NoiseForecast(privacy.participants, size, exchanges, each)


class Release(NamedTuple):
    """The privacy loss of one release, whatever run made it.

    The sum of replies of so many `blocks` had so many `shares` of the noise, which was
    to consist of those of all `participants`. Without `noise` it is 0. A `delta` is
    noted with it; what many releases reveal can be said at any.
    """

    noise: float
    participants: int
    blocks: int
    shares: int
    delta: float

    @property
    def multiplier(self) -> float:
        """The deviation of the noise, over the most that a client moves the sum."""
        share = self.shares / self.participants
        return self.noise * math.sqrt(share / max(self.blocks, 1))


IN_THE_CLEAR = Release(0.0, 1, 1, 1, 0.0)


def release_of(job: Job, blocks: int, shares: int) -> Release:
    """Return what a reply of a job is, in a sum with so many shares of noise."""
    privacy = noisy(job)
    if privacy is None:
        return IN_THE_CLEAR
    seen = shares if _adds_up(job) else 1
    noise, participants = float(privacy.noise), privacy.participants
    return Release(noise, participants, blocks, seen, privacy.delta)


def epsilon_of(releases: Mapping[Release, int], delta: float) -> float:
    """Return the epsilon of all releases together, each with the noise that it had."""
    # Noise hides wholly where there is nothing to hide.
    events = [
        (one.multiplier, times)
        for one, times in releases.items()
        if times and (one.blocks or not one.noise)
    ]
    return epsilon_of_events(events, delta)


def privacy_of_releases(
    job: Job, releases: Mapping[tuple[int, int], int]
) -> dict[str, float]:
    """Return epsilon and delta of releases that were made, and how many they are.

    They are counted by the blocks of a reply and by the shares of noise in the sum. An
    exchange that was made again is one release more: its noise is another one.
    """
    privacy = noisy(job)
    if privacy is None:
        return {}
    counted: Counter[Release] = Counter()
    for (blocks, shares), times in releases.items():
        counted[release_of(job, blocks, shares)] += times
    found = epsilon_of(counted, privacy.delta)
    total = sum(times for one, times in counted.items() if one.blocks)
    return {"epsilon": found, "delta": privacy.delta, "releases": total}


def _adds_up(job: Job) -> bool:
    """Say whether only the sum of noisy replies is seen.

    Compressed apart from each other, or not added up at all, a client's reply is hidden
    by its own share of the noise only.
    """
    one_coder = len(job.channel.coders) == 1
    gathered = any(phase.gathers for phase in job.every_phase().values())
    return job.channel.reduction.adds_up and one_coder and not gathered
