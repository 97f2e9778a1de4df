"""Channels as the command line and experiments write them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedbilevel import channels
from fedbilevel._schema import Settings
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.runtime import Job
from fedbilevel.runtime.privacy import noise_forecast

QUANTILE = "quantile"
CHANNEL = ("clip", "noise", "compress", "compress_down", "aggregate")

Part = TypeVar("Part", channels.AbstractCoder, channels.AbstractReduction)
# A name's class, an example, and the reader of its number, if it has one.
Known = Mapping[str, tuple[Callable[..., Part], str, Callable[[str], Any] | None]]

_COMPRESSIONS: Known[channels.AbstractCoder] = {
    "topk": (channels.TopK, "topk:0.1", float),
    "quantize": (channels.Quantize, "quantize:8", int),
    "bfloat16": (channels.BFloat16, "bfloat16", None),
}
# The server sends a point, of which no entry may be missing.
_COMPRESSIONS_DOWN: Known[channels.AbstractCoder] = {
    "bfloat16": _COMPRESSIONS["bfloat16"]
}
_REDUCTIONS: Known[channels.AbstractReduction] = {
    "mean": (channels.Mean, "mean", None),
    "median": (channels.Median, "median", None),
    "trimmed-mean": (channels.TrimmedMean, "trimmed-mean:0.1", float),
    "geometric-median": (channels.GeometricMedian, "geometric-median", None),
    "krum": (channels.Krum, "krum:1", int),
    "secure": (channels.SecureMean, "secure", None),
}


def read_quantile(clip: float | str | None) -> float | None:
    """Return the quantile that changes are cut to; None where no text asks for one."""
    name, colon, share = str(clip).partition(":")
    if name != QUANTILE:
        return None
    try:
        quantile = float(share) if colon else 0.5
    except ValueError:
        quantile = math.nan
    if not 0 < quantile < 1:
        raise InvalidInputError(
            f"clip='{clip}': write it like {QUANTILE}:0.9, with a share between 0 and "
            "1 of the changes that are not to be cut."
        )
    return quantile


def as_clip(given: Any) -> Any:
    """Return a number that comes as text, from a command line, as a number."""
    try:
        return float(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _bound(clip: float | str) -> float:
    try:
        return float(clip)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"clip='{clip}' is neither a number, the norm that every block of a change "
            f"is cut down to, nor {QUANTILE} or {QUANTILE}:SHARE."
        ) from None


def channel_of(settings: Settings) -> channels.Channel:
    """Return what the replies of a run go through."""
    given = {name: getattr(settings, name) for name in CHANNEL}
    return read_channel(**given, delta=settings.delta)


def read_channel(
    clip: float | str | None = None,
    noise: float = 0.0,
    compress: str | None = None,
    aggregate: str = Settings.aggregate,
    delta: float = Settings.delta,
    compress_down: str | None = None,
) -> channels.Channel:
    """Read a channel.

    `clip` is a number, or quantile:SHARE, which is no part of the channel but of the
    algorithm, and checked alone. `compress` is topk:FRACTION, quantize:BITS or
    bfloat16, and `compress_down` bfloat16; `aggregate` is mean, secure, median,
    trimmed-mean:FRACTION, geometric-median or krum:FAULTY.
    """
    coders: list[channels.AbstractCoder] = []
    quantile = read_quantile(clip)
    if quantile is not None:
        _check_alone(clip, noise, compress)
    elif clip is not None:
        coders.append(channels.Privacy(_bound(clip), noise, delta=delta))
    elif noise:
        raise InvalidInputError(
            f"noise={noise:g} without a clip protects no one: a change may be of any "
            "size. Give clip, the norm that every block of a change is cut down to."
        )
    if compress is not None:
        coders.append(_part("compress", compress, _COMPRESSIONS))
    down: Any = None
    if compress_down is not None:
        down = _part("compress_down", compress_down, _COMPRESSIONS_DOWN)
    return channels.Channel(
        tuple(coders), _part("aggregate", aggregate, _REDUCTIONS), down
    )


def _check_alone(clip: float | str | None, noise: float, compress: str | None) -> None:
    """Raise for what does not go with a running quantile."""
    if noise:
        raise InvalidInputError(
            f"clip={clip} and noise={noise:g}: a bound that follows the norms of the "
            "changes reveals them, and no epsilon counts that. Give clip as a number."
        )
    if compress is not None:
        raise InvalidInputError(
            f"clip={clip} and compress={compress}: what clients report of their norms "
            "would be thinned out or rounded with the rest. Leave out one of the two."
        )


def _part(option: str, text: str, known: Known[Part]) -> Part:
    name, colon, number = text.partition(":")
    if name not in known:
        raise unknown_name(f"value of {option}", name, known)
    make, example, convert = known[name]
    try:
        values = [] if convert is None else [convert(number)]
    except ValueError:
        values = None
    if values is None or (colon and not values):
        raise InvalidInputError(f"{option}='{text}': write it like {example}.")
    return make(*values)


def require_signal(
    settings: Settings, job: Job, rounds: int, say: Callable[[str], None]
) -> None:
    """Say what noise leaves of a run; raise where that is nothing, if not forced."""
    found = noise_forecast(job, rounds)
    if found is None:
        return
    if found.whole < 1 and not settings.force:
        raise InvalidInputError(
            f"--noise {settings.noise:g} hides whatever the sites find: {found}. Let "
            "more sites take part, train fewer parameters, ask for less noise or for "
            "more --rounds, or give --force."
        )
    say(f"Noise: {found}.")
