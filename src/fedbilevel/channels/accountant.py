r"""What a run with noise reveals: epsilon at a delta, for a client as a whole.

Who sees the sum over participants of an exchange, but not the single replies, cannot
tell whether a client's changes were those it sent or zeros, up to (epsilon, delta). So
the guarantee is that of a trusted server, or of secure aggregation. With b blocks cut
down to the norm C each and noise of deviation sigma C on their sum, one exchange is a
Gaussian mechanism of noise multiplier sigma / sqrt(b); with m of n participants present
only m shares of the noise are there, and it is sigma sqrt(m / n) / sqrt(b). Renyi
differential privacy adds them up.
"""

import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from fedbilevel.errors import InvalidInputError

__all__ = ["epsilon"]


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
    exchange. Where fewer than all clients take part and who does is drawn, secretly and
    afresh for each exchange, that hides a client further. The bound for it needs a
    client to be replaced by any other, which moves the sum by 2 C, so it may be the
    larger one: the less of both is returned. With `present` given there is no such
    gain: who stays away is not drawn.
    """
    if not (noise > 0 and 0 < delta < 1):
        raise InvalidInputError(
            f"noise={noise:g}, delta={delta:g}: there is an epsilon for noise above 0 "
            "and delta between 0 and 1."
        )
    shares = np.broadcast_to(participants if present is None else present, exchanges)
    kinds = Counter(
        zip(np.broadcast_to(blocks, exchanges).tolist(), shares.tolist(), strict=True)
    )
    events = [
        (noise * math.sqrt(share / participants / count), times)
        for (count, share), times in kinds.items()
    ]
    bounds = [_direct(events, delta)]
    if participants < clients and present is None:
        bounds.append(_drawn(events, participants, clients, delta))
    return min(bounds)


def _direct(events: list[tuple[float, int]], delta: float) -> float:
    library = _library()
    accountant = library.rdp.RdpAccountant()
    for multiplier, times in events:
        accountant.compose(library.GaussianDpEvent(multiplier), times)
    return float(accountant.get_epsilon(delta))


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
