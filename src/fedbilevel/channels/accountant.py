r"""The privacy loss of a run with noise: epsilon at a delta, for a whole client.

An observer of the sum over participants of an exchange, but not of single replies,
cannot decide whether a client's changes were those it sent or zeros, up to (epsilon,
delta). The guarantee is that of a trusted server, or of secure aggregation. With b
blocks cut down to the norm C each and noise of deviation sigma C on their sum, one
exchange is a Gaussian mechanism of noise multiplier sigma / sqrt(b); with m of n
participants present only m shares of the noise are there, and it is sigma sqrt(m / n) /
sqrt(b).

Gaussian mechanisms of multipliers s_1, s_2, ... together are one of multiplier s with
1 / s^2 = sum 1 / s_i^2, since their privacy losses, which are normal, add up. So
epsilon is known exactly (Balle and Wang 2018); accountants of privacy loss
distributions (PLD) approach the same number from above, on a grid. Renyi differential
privacy (RDP) gives a larger one, but covers cohorts that are drawn. The least bound
that applies is reported.

The discrete Gaussian noise of a site has a deviation of s >= 2^20 steps of its grid. In
d coordinates and T releases it is within sqrt(T d / 1152) / s^2 in total variation of
rounded Gaussian noise, for which all of this holds; with T d = 10^9 that takes less
than 1e-9 (1 + e^epsilon) of delta.
"""

import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from fedbilevel.errors import InvalidInputError

_LEAST = 1e-9  # times the most that a client moves the sum: noise that hides nothing


def epsilon(
    noise: float,
    blocks: int | Sequence[int] | np.ndarray,
    exchanges: int,
    participants: int,
    clients: int,
    delta: float,
    present: int | Sequence[int] | np.ndarray | None = None,
) -> float:
    """Return the epsilon of all exchanges together.

    `blocks` of a reply and participants `present` are one number, or one for every
    exchange. A cohort of fewer than all clients, drawn secretly and afresh for each
    exchange, hides a client further. The bound for it needs a client to be replaced by
    any other, which moves the sum by 2 C, so it may be the larger one: the less of both
    is returned. With `present` given there is no such gain: absence is not drawn.
    """
    _check(noise, delta)
    shares = np.broadcast_to(participants if present is None else present, exchanges)
    kinds = Counter(
        zip(np.broadcast_to(blocks, exchanges).tolist(), shares.tolist(), strict=True)
    )
    events = [
        (noise * math.sqrt(share / participants / count), times)
        for (count, share), times in kinds.items()
        if count
    ]
    found = epsilon_of_events(events, delta)
    if participants < clients and present is None:
        found = min(found, _drawn(events, participants, clients, delta))
    return found


def epsilon_of_events(events: Sequence[tuple[float, int]], delta: float) -> float:
    """Return the epsilon of Gaussian releases, by noise multipliers and their counts.

    A multiplier of 0 is a release without noise, for which there is no finite one.
    Others out of all proportion count as one of the range that squares can be taken of.
    """
    events = [(min(one, 1 / _LEAST), times) for one, times in events if times]
    if any(multiplier < _LEAST for multiplier, _ in events):
        return math.inf
    _check(max((multiplier for multiplier, _ in events), default=1.0), delta)
    library = _library()
    if not events:
        return 0.0
    together = 1 / math.sqrt(sum(times / one**2 for one, times in events))
    accountant = library.rdp.RdpAccountant()
    for multiplier, times in events:
        accountant.compose(library.GaussianDpEvent(multiplier), times)
    exact = float(library.get_epsilon_gaussian(together, delta))
    return min(exact, float(accountant.get_epsilon(delta)))


def _check(noise: float, delta: float) -> None:
    if not (noise > 0 and 0 < delta < 1):
        raise InvalidInputError(
            f"noise={noise:g}, delta={delta:g}: there is an epsilon for noise above 0 "
            "and delta between 0 and 1."
        )


def _drawn(
    events: list[tuple[float, int]], participants: int, clients: int, delta: float
) -> float:
    library = _library()
    accountant = library.rdp.RdpAccountant(
        neighboring_relation=library.NeighboringRelation.REPLACE_ONE
    )
    for multiplier, times in events:
        # The library takes the deviation over the distance of two sums, here 2 C.
        event = library.GaussianDpEvent(multiplier / 2)
        drawn = library.SampledWithoutReplacementDpEvent(clients, participants, event)
        accountant.compose(drawn, times)
    return float(accountant.get_epsilon(delta))


def _library() -> ModuleType:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise InvalidInputError(
            "noise is accounted for with the library dp-accounting, which is not "
            "installed: `pip install 'fedbilevel[privacy]'`, or leave out the noise."
        ) from error
    return dp_accounting
