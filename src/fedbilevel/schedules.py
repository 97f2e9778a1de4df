r"""Step sizes eta_t as functions of the local iteration t, and fields for numbers.

Every number in a schedule is an array leaf, so that another value neither recompiles a
program nor prevents a sweep from being one `vmap`. Any function of t works in their
place, an Optax schedule for instance. A field says what it means, for listings of an
algorithm's parameters.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from fedbilevel._types import Number as Number
from fedbilevel.errors import InvalidInputError
from fedbilevel.units import AbstractRelative

Step: TypeAlias = Int[Array, ""] | int
if TYPE_CHECKING:
    # Fields of this type take numbers, too, which type checkers do not see.
    Schedule: TypeAlias = Any
else:
    Schedule: TypeAlias = Callable[[Any], Float[Array, ""]]


def as_number(value: Any) -> Any:
    """Turn a number into an array leaf of the default floating type.

    One that a run fixes, such as `OfCurvature(0.5)`, stays as it is.
    """
    if isinstance(value, AbstractRelative):
        return value
    most = float(jnp.finfo(jnp.asarray(0.0)).max)
    if isinstance(value, float) and most < abs(value) < np.inf:
        raise InvalidInputError(
            f"{value:g} is too large for this precision, which ends at {most:.3g}."
        )
    return jnp.asarray(value, dtype=float)


@dataclass(frozen=True)
class Effective:
    """The default of a parameter: the first of some options, converted.

    Options mean the same for every method. The value is divided by the schedule `over`
    at t = 0, to a `power`, where that is only a shape, and multiplied by the count
    `times`. `convert(value, made)` sees the fields named in `after`, read before.
    """

    names: tuple[str, ...]
    over: str | None = None
    power: int = 1
    times: str | None = None
    convert: Callable[[Any, Any], Any] = lambda value, _: value
    after: tuple[str, ...] = ()


def number(meaning: str, *, step: str = "", **more: Any) -> Any:
    """Declare a number of an algorithm: an array leaf.

    A `step` is one of the "upper" or of the "lower" level, or a "bound" of curvature,
    of which a step is the inverse: steps that proved too long are shortened by that.
    `above`, `least`, `most` and `below` bound its value; `effective` says what it is
    if it is not given.
    """
    names = ("effective", "above", "least", "most", "below")
    known = {name: more.pop(name) for name in names if name in more}
    metadata = {"meaning": meaning, "step": step, **known}
    return eqx.field(converter=as_number, metadata=metadata, **more)


def step(level: str, meaning: str, *, over: str | None = None, **more: Any) -> Any:
    """Declare a step size of the "upper" or "lower" level, or of z ("auxiliary").

    It follows from the option `upper_step`, `lower_step` or `auxiliary_step`.
    """
    kind = "upper" if level == "upper" else "lower"
    effective = _effective(level, "step", over, more)
    return number(meaning, step=kind, effective=effective, **more)


def weight(level: str, meaning: str, *, over: str | None = None, **more: Any) -> Any:
    """Declare a momentum weight; it follows from `upper_weight` and the like."""
    effective = _effective(level, "weight", over, more)
    return number(meaning, effective=effective, **more)


def _effective(level: str, what: str, over: str | None, more: Any) -> Effective:
    """Return where a parameter follows from; take what it says of that out of more."""
    levels = (level, "lower") if level == "auxiliary" else (level,)
    names = tuple(f"{one}_{what}" for one in levels)
    known = ("power", "times", "convert", "after")
    return Effective(names, over, **{n: more.pop(n) for n in known if n in more})


def optional(meaning: str, **more: Any) -> Any:
    """Declare a number that may be missing."""

    def converted(value: Any) -> Any:
        return None if value is None else as_number(value)

    known = {"meaning": meaning}
    return eqx.field(converter=converted, default=None, metadata=known, **more)


def schedule(meaning: str, **more: Any) -> Any:
    """Declare a number that may change over t."""
    return eqx.field(converter=as_schedule, metadata={"meaning": meaning}, **more)


def count(meaning: str, *, least: int = 1, **more: Any) -> Any:
    """Declare a count, which shapes the program and is at least `least`."""
    metadata = {"meaning": meaning, "least": least}
    return eqx.field(static=True, metadata=metadata, **more)


def choice(meaning: str, *, default: bool, **more: Any) -> Any:
    """Declare a choice between two variants, which shapes the program."""
    known = {"meaning": meaning}
    return eqx.field(static=True, default=default, metadata=known, **more)


def word(
    meaning: str, words: Sequence[str], *, default: str | None, **more: Any
) -> Any:
    """Declare a choice between words, or none of them, which shapes the program."""
    metadata = {"meaning": meaning, "words": tuple(words)}
    return eqx.field(static=True, default=default, metadata=metadata, **more)


def check_fields(owner: Any, name: str = "") -> None:
    """Raise unless every field is within the bounds, or of the words, it declares."""
    name = name or type(owner).__name__
    for one in fields(owner):
        value: Any = getattr(owner, one.name)
        known = one.metadata
        words = known.get("words", ())
        if words and value not in (*words, one.default):
            shown = ", ".join(map(repr, dict.fromkeys((one.default, *words))))
            problem = f"is one of {shown}, got {value!r}"
        elif one.type is int and not isinstance(value, SupportsIndex):
            problem = f"is a whole number, got {value}{_swapped(owner)}"
        elif _within(value, known):
            continue
        else:
            given = np.asarray(value).ravel()
            shown = ", ".join(f"{number:g}" for number in given)
            problem = f"must be {_bounds(known)}, got {shown}"
        raise InvalidInputError(f"`{name}({one.name}=...)` {problem}.")


def _swapped(owner: Any) -> str:
    """Name a number of the owner that could be the count, as where two are swapped."""
    for one in fields(owner):
        value = getattr(owner, one.name)
        number = "step" in one.metadata and is_known(value) and np.ndim(value) == 0
        if number and value > 1 and value == np.round(value):
            return f", and {one.name} is {value:g}, as if the two were swapped"
    return ""


def _within(value: Any, known: Mapping[str, Any]) -> bool:
    bounds = {name: known[name] for name in _BOUNDS if name in known}
    if not bounds or value is None or not is_known(value):
        return True
    given = np.asarray(value)
    return all(_BOUNDS[name][1](given, bound).all() for name, bound in bounds.items())


def _bounds(known: Mapping[str, Any]) -> str:
    found = ((text, known[n]) for n, (text, _) in _BOUNDS.items() if n in known)
    return " and ".join(f"{text} {bound:g}" for text, bound in found)


_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "above": ("above", operator.gt),
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def part(meaning: str, **more: Any) -> Any:
    """Declare a part with parameters of its own, or a number that may be missing."""
    return eqx.field(metadata={"meaning": meaning}, **more)


def documented(kind: type) -> str:
    """Return what a class says of itself, with the meanings of its fields."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[1:]):
        found |= getattr(base, "__dataclass_fields__", {})
    # Of a class that is being made the fields are its attributes still.
    found |= {n: f for n, f in vars(kind).items() if isinstance(f, Field)}
    return with_meanings(
        kind.__doc__ or f"{kind.__name__}.",
        {n: f.metadata["meaning"] for n, f in found.items() if "meaning" in f.metadata},
    )


def with_meanings(text: str, meanings: dict[str, str]) -> str:
    """Append what parameters mean to a docstring."""
    if not meanings:
        return text
    lines = [f"    `{name}`: {meaning}." for name, meaning in meanings.items()]
    return "\n".join([text.rstrip(), "", "    Parameters:", "", *lines, "    "])


class Constant(eqx.Module):
    """The same step, `value`, at every t."""

    value: Float[Array, "..."] = eqx.field(converter=as_number)

    def __call__(self, t: Step) -> Float[Array, ""]:
        """Return the step at iteration t."""
        del t
        return self.value


class CubeRootDecay(eqx.Module):
    """The practical decay `c0` / (`w0` + t)^(1/3), as used by MRBO and SUSTAIN."""

    c0: Float[Array, "..."] = eqx.field(converter=as_number)
    w0: Float[Array, "..."] = eqx.field(converter=as_number)

    def __call__(self, t: Step) -> Float[Array, ""]:
        """Return the step at iteration t."""
        return self.c0 / jnp.cbrt(self.w0 + jnp.asarray(t, self.w0.dtype))


class PowerDecay(eqx.Module):
    """A decay `c0` / (`w0` + t)^`power`, such as the two of TTSA."""

    c0: Float[Array, "..."] = eqx.field(converter=as_number)
    w0: Float[Array, "..."] = eqx.field(converter=as_number)
    power: Float[Array, "..."] = eqx.field(converter=as_number)

    def __call__(self, t: Step) -> Float[Array, ""]:
        """Return the step at iteration t."""
        return self.c0 / (self.w0 + jnp.asarray(t, self.w0.dtype)) ** self.power


class TheoremThree(eqx.Module):
    r"""The literal schedule of Theorem 3 (Gao 2022).

        eta_t = min{ K^(2/3) / (Lhat (t+2)^(1/3)), 1/(200 p Lhat), 1/(2 rho1 L_Phi) }

    with K `clients`, p `local_steps`, and the constants `l_hat`, `l_phi` and `rho1`,
    which is the printed max-of-three weight w_t solved for eta. It stays constant until
    t is about 200^3 K^2 p^3: `CubeRootDecay` is the one to use in practice.
    """

    clients: Float[Array, "..."] = eqx.field(converter=as_number)
    local_steps: Float[Array, "..."] = eqx.field(converter=as_number)
    rho1: Float[Array, "..."] = eqx.field(converter=as_number)
    l_hat: Float[Array, "..."] = eqx.field(converter=as_number)
    l_phi: Float[Array, "..."] = eqx.field(converter=as_number)

    def __call__(self, t: Step) -> Float[Array, ""]:
        """Return the step at iteration t."""
        time = jnp.asarray(t, self.l_hat.dtype)
        decay = self.clients ** (2 / 3) / (self.l_hat * jnp.cbrt(time + 2))
        drift = 1 / (200 * self.local_steps * self.l_hat)
        smooth = 1 / (2 * self.rho1 * self.l_phi)
        return jnp.minimum(decay, jnp.minimum(drift, smooth))


def as_schedule(value: Any) -> Any:
    """Take a schedule as it is, a number as a constant one."""
    return value if callable(value) else Constant(value)


def is_known(value: Any) -> bool:
    """Say whether a number has its value now, and not only inside a run or a sweep."""
    return not isinstance(value, Tracer | AbstractRelative)


def describe(part: Any) -> Any:
    """Write a schedule or any other part of an algorithm as plain data."""
    if isinstance(part, AbstractRelative):
        return str(part)
    if isinstance(part, Constant):
        return describe(part.value)
    if eqx.is_array(part):
        return float(part)
    if isinstance(part, tuple | list):  # such as an Optax transformation
        return [describe(one) for one in part]
    if not isinstance(part, eqx.Module):
        return getattr(part, "__qualname__", repr(part)) if callable(part) else part
    fields = {name: describe(value) for name, value in vars(part).items()}
    return {"kind": type(part).__name__, **fields}


def parse_schedule(
    text: str, *, clients: int, local_steps: int, rho1: float
) -> Schedule:
    """Read a schedule as the command line writes it.

    `0.1` is constant, `decay:C0:W0` the practical decay, `decay:C0:W0:POWER` one by any
    power, `theorem3:LHAT:LPHI` the literal one.
    """
    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
        if name == "decay" and len(values) == 3:
            return PowerDecay(*values)
        if name == "decay":
            c0, w0 = values
            return CubeRootDecay(c0, w0)
        if name == "theorem3":
            l_hat, l_phi = values
            return TheoremThree(clients, local_steps, rho1, l_hat, l_phi)
        return Constant(float(text))
    except ValueError:
        raise InvalidInputError(
            f"eta='{text}' is no schedule. Write a number, decay:C0:W0, "
            "decay:C0:W0:POWER, or theorem3:LHAT:LPHI."
        ) from None
