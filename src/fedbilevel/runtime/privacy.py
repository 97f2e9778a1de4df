"""How much a run with noise reveals of a client: the accountant, asked for a job."""

import jax
import numpy as np

from fedbilevel.channels.accountant import epsilon
from fedbilevel.runtime.counts import Ledger
from fedbilevel.runtime.exchange import start_kept
from fedbilevel.runtime.job import ABSENT, Job, stages

__all__ = ["privacy_spent"]


def privacy_spent(job: Job, ledger: Ledger, rounds: int) -> dict[str, float]:
    """Return epsilon and delta of a run of so many rounds; nothing without noise."""
    privacy = job.channel.privacy
    if privacy is None or not float(privacy.noise):
        return {}
    blocks = ledger.blocks(job.key, rounds)
    participants, present = privacy.participants, None
    if job.attendance is not None:
        rows = np.asarray(job.attendance)[: len(blocks)]
        present = (rows > ABSENT).sum(axis=1)
    # Compressed apart from each other, or not added up at all, a client's reply is
    # hidden by its own share of the noise only.
    phases = [phase for _, every in stages(job) for phase in every]
    added_up = job.channel.reduction.adds_up and len(job.channel.coders) == 1
    added_up = added_up and not any(phase.gathers for phase in phases)
    if not added_up:
        present = np.ones_like(blocks)
    # That a cohort is drawn protects clients that keep nothing between exchanges. What
    # others send depends on when they were drawn before, which no bound here covers.
    forgets = not jax.tree.leaves(start_kept(job))
    drawn = forgets and added_up and not any(phase.everyone for phase in phases)
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
