"""Channels as the command line and experiments write them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedbilevel.channels import (
    AbstractCoder,
    AbstractReduction,
    Channel,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    Privacy,
    Quantize,
    SecureMean,
    TopK,
    TrimmedMean,
)
from fedbilevel.errors import InvalidInputError, unknown_name

__all__ = ["read_channel"]

Part = TypeVar("Part", AbstractCoder, AbstractReduction)
# What a name stands for, an example, and how the number in it is read, if it has one.
Known = Mapping[str, tuple[Callable[..., Part], str, Callable[[str], Any] | None]]

_COMPRESSIONS: Known[AbstractCoder] = {
    "topk": (TopK, "topk:0.1", float),
    "quantize": (Quantize, "quantize:8", int),
}
_REDUCTIONS: Known[AbstractReduction] = {
    "mean": (Mean, "mean", None),
    "median": (Median, "median", None),
    "trimmed-mean": (TrimmedMean, "trimmed-mean:0.1", float),
    "geometric-median": (GeometricMedian, "geometric-median", None),
    "krum": (Krum, "krum:1", int),
    "secure": (SecureMean, "secure", None),
}


def read_channel(
    clip: float | None = None,
    noise: float = 0.0,
    compress: str | None = None,
    aggregate: str = "mean",
    delta: float = 1e-5,
) -> Channel:
    """Read a channel.

    `compress` is topk:FRACTION or quantize:BITS; `aggregate` is mean, secure, median,
    trimmed-mean:FRACTION, geometric-median or krum:FAULTY.
    """
    coders: list[AbstractCoder] = []
    if clip is not None:
        coders.append(Privacy(clip, noise, delta=delta))
    elif noise:
        raise InvalidInputError(
            f"noise={noise:g} without a clip protects nobody: a change may be of any "
            "size. Give clip, the norm that every block of a change is cut down to."
        )
    if compress is not None:
        coders.append(_part("compress", compress, _COMPRESSIONS))
    return Channel(tuple(coders), _part("aggregate", aggregate, _REDUCTIONS))


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
