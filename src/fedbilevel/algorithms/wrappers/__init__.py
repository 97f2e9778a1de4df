"""Wrappers: every variation of a method, by its name, and what options stand for.

A wrapper has the method's own contract, so that wrappers nest:
`steady(controls(FedBiO(...)))`. Those of local steps come inside of those of the round.
The command line writes `--with controls --with warm-start=20`. Values follow in the
order of the wrapper's parameters, with colons between them.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple

import equinox as eqx

from fedbilevel._types import Number
from fedbilevel.algorithms.base import AbstractAlgorithm
from fedbilevel.algorithms.one_loop import OneLoop, TakesOptions
from fedbilevel.algorithms.parts import OwnNumber
from fedbilevel.algorithms.wrappers import drift, steps
from fedbilevel.algorithms.wrappers.base import With
from fedbilevel.algorithms.wrappers.clip import QuantileClip, quantile_clipped
from fedbilevel.algorithms.wrappers.drift import KEEP, use_of_memory
from fedbilevel.algorithms.wrappers.measured_steps.steps import SteadySteps
from fedbilevel.algorithms.wrappers.measured_steps.steps import steadied as steadied
from fedbilevel.algorithms.wrappers.optimizer import (
    Adam,
    Descent,
    LocalOptimizer,
    ServerOptimizer,
)
from fedbilevel.algorithms.wrappers.round import Average, Largest, Quantized
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.schedules import check_fields, choice, count, optional, word


def _wraps(kind: Callable, part: Callable) -> Callable[..., Any]:
    return lambda algorithm, *values, **named: kind(algorithm, part(*values, **named))


def _onto(kind: type[eqx.Module], block: str) -> Callable[..., Any]:
    def project(algorithm: OneLoop, *values: Any, block: str = block, **named: Any):
        return With(algorithm, steps.Project(kind(*values, **named), block))

    return project


controls: Callable[..., Any] = _wraps(With, drift.Controls)
anchor: Callable[..., Any] = _wraps(With, drift.Anchor)
proximal: Callable[..., Any] = _wraps(With, drift.Proximal)
absent: Callable[..., Any] = _wraps(With, drift.Absent)
first_batch: Callable[..., Any] = _wraps(With, steps.FirstBatch)
warm_start: Callable[..., Any] = _wraps(With, steps.WarmStart)
ball: Callable[..., Any] = _onto(steps.Ball, "z")
box: Callable[..., Any] = _onto(steps.Box, "x")
simplex: Callable[..., Any] = _onto(steps.Simplex, "x")
half_space: Callable[..., Any] = _onto(steps.HalfSpace, "x")
differences: Callable[..., Any] = steps.Differences
alternating: Callable[..., Any] = steps.Alternating
own_lower: Callable[..., Any] = steps.OwnLower
average: Callable[..., Any] = Average
server_descent: Callable[..., Any] = _wraps(ServerOptimizer, Descent)
server_adam: Callable[..., Any] = _wraps(ServerOptimizer, Adam)
steady: Callable[..., Any] = SteadySteps


def unequal_steps(algorithm: OneLoop, fewest_steps: int) -> Any:
    """Let every client make a number of local steps of its own, so many at least."""
    return With(algorithm, OwnNumber(fewest_steps, algorithm.local_steps))


def server_momentum(algorithm: AbstractAlgorithm, beta: float = 0.9) -> Any:
    """Let the server move with momentum, as FedAvgM's does."""
    return server_descent(algorithm, 1.0, beta)


def local_momentum(algorithm: OneLoop, beta: float = 0.9) -> Any:
    """Let clients move with momentum that stays on them."""
    momentum = Descent(1.0, beta)
    return LocalOptimizer(algorithm, momentum, local_steps=algorithm.local_steps)


class Wrapper(NamedTuple):
    """A wrapper by its name: `make(algorithm, **parameters)` applies it."""

    name: str
    summary: str
    make: Callable[..., AbstractAlgorithm]
    parameters: dict[str, Field]

    def usage(self) -> str:
        """Return how it is written, with values that may be left out in brackets."""
        text = self.name
        for place, one in enumerate(self.parameters.values()):
            value = f"{':' if place else '='}{one.name.upper()}"
            text += value if one.default is MISSING else f"[{value}]"
        return text


def _wrapper(
    name: str, summary: str, make: Any, kind: Any = None, *names: str
) -> Wrapper:
    """Return an entry, whose parameters are the named fields of a class, or all."""
    own = {one.name: one for one in fields(kind)} if kind else {}
    own = {one: own[one] for one in own if one not in ("algorithm", "named")}
    return Wrapper(name, summary, make, {one: own[one] for one in names or own})


_ENTRIES: Any = (
    ("absent", "Clients that missed rounds keep, correct or forget STORM's memory.")
    + (absent, drift.Absent),
    ("alternating", "Blocks move in turn, the lower level first.", alternating),
    ("anchor", "Corrects drift by an exchange before the local steps.", anchor),
    ("average", "Reports the mean of x over all rounds (Polyak, Ruppert).", average),
    ("ball", "Keeps z in a ball of this radius.", ball, steps.Ball),
    ("box", "Keeps the entries of x between two numbers.", box, steps.Box),
    ("clip", "Cuts changes to a running quantile of their norms.", quantile_clipped)
    + (QuantileClip,),
    ("controls", "Corrects drift by control variates (SCAFFOLD).", controls),
    ("differences", "Takes differences of gradients for products.", differences)
    + (steps.Differences,),
    ("first-batch", "Forms first directions from so many bundles.", first_batch)
    + (steps.FirstBatch,),
    ("half-space", "Keeps the sum of the entries of x below a bound.", half_space)
    + (steps.HalfSpace,),
    ("local-momentum", "Lets clients move with momentum of their own.", local_momentum)
    + (Descent, "beta"),
    ("own-lower", "Lets every client keep its y to itself.", own_lower),
    ("proximal", "Draws local steps back to where they began.", proximal)
    + (drift.Proximal,),
    ("quantize", "Rounds replies to so many bits, at random.", Quantized, Quantized),
    ("server-adam", "Lets the server step as FedAdam's.", server_adam, Adam),
    ("server-momentum", "Lets the server move with momentum.", server_momentum)
    + (Descent, "beta"),
    ("server-step", "Lets the server step along the mean move.", server_descent)
    + (Descent, "lr_server", "beta"),
    ("simplex", "Keeps x on a simplex.", simplex, steps.Simplex),
    ("steady", "Measures steps, and rolls back a diverging run.", steady, SteadySteps),
    ("top-k", "Sends the largest entries, the others later.", Largest, Largest),
    ("unequal-steps", "Lets slow clients make fewer local steps.", unequal_steps)
    + (OwnNumber, "fewest_steps"),
    ("warm-start", "Makes lower steps before the first round.", warm_start)
    + (steps.WarmStart,),
)
WRAPPERS: Mapping[str, Wrapper] = {one[0]: _wrapper(*one) for one in _ENTRIES}


def read_wrapper(text: str) -> Callable[[Any], AbstractAlgorithm]:
    """Read `name` or `name=value:value`, and return a function that wraps a method."""
    name, given, values = text.partition("=")
    if name not in WRAPPERS:
        raise unknown_name("wrapper", name, WRAPPERS)
    wrapper, texts = WRAPPERS[name], values.split(":") if given else []
    known = list(wrapper.parameters.values())
    needed = [one.name for one in known if one.default is MISSING]
    if not len(needed) <= len(texts) <= len(known):
        raise InvalidInputError(f"wrapper '{text}': write it as {wrapper.usage()}.")
    pairs = zip(known, texts, strict=False)
    named = {one.name: _value(one, value, text) for one, value in pairs}
    return lambda algorithm: wrapper.make(algorithm, **named)


def _value(one: Field, text: str, whole: str) -> Any:
    if "words" in one.metadata:
        return text
    if one.type is bool and text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if one.type is int else float(text)
    except ValueError:
        kind = "a whole number" if one.type is int else "a number"
        raise InvalidInputError(
            f"wrapper '{whole}': {one.name} is {kind}, got '{text}'."
        ) from None


class Options(eqx.Module):
    """Options that every method of one loop takes. Each stands for a wrapper."""

    own_lower: bool = choice("every client keeps a y of its own", default=False)
    alternating: bool = choice(
        "move the lower level first, then x, each at fresh values", default=False
    )
    radius: Number | None = optional("bound of ||z||")
    distance: Number | None = optional(
        "distance of the points whose gradients' difference stands for a product"
    )
    drift: str | None = word(
        "how local steps are corrected", ("controls", "anchor"), default=None
    )
    first_batch: int = count("bundles of the first directions, B", default=1)
    absent: str = use_of_memory()
    warm_start: int = count("lower steps before the first round", default=0, least=0)

    def applied(self, algorithm: OneLoop) -> Any:
        """Return a method with the wrappers that are asked for."""
        check_fields(self, type(algorithm).__name__)
        chain = (
            (self.own_lower, own_lower),
            (self.alternating, alternating),
            (self.distance is not None, differences, self.distance),
            (self.radius is not None, ball, self.radius),
            (self.drift == "controls", controls),
            (self.drift == "anchor", anchor),
            (self.first_batch > 1, first_batch, self.first_batch),
            (self.absent != KEEP, absent, self.absent),
            (self.warm_start > 0, warm_start, self.warm_start),
        )
        made: Any = algorithm
        for is_asked, wrap, *values in chain:
            made = wrap(made, *values) if is_asked else made
        return made


OPTIONS: Mapping[str, Field] = {one.name: one for one in fields(Options)}


def with_options(algorithm: OneLoop, options: Mapping[str, Any]) -> Any:
    """Return a method with options, each of which is a wrapper around it."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(
                f"`{type(algorithm).__name__}` has no parameter '{name}'. Options are "
                f"{', '.join(OPTIONS)}."
            )
    return Options(**options).applied(algorithm)


TakesOptions.applied = with_options


def options_for(kind: type[AbstractAlgorithm]) -> dict[str, Field]:
    """Return the options that mean something for a method."""
    if not issubclass(kind, OneLoop):
        return {}
    moves = kind.moves if isinstance(kind.moves, tuple) else ("x", "y")
    left_out = {one.name for one in fields(kind)}
    left_out |= {"radius", "distance"} if "z" not in moves else set()
    left_out |= {"own_lower", "alternating"} if "x" not in moves else set()
    estimator: Any = kind.estimator
    if not getattr(estimator, "keeps_point", False):
        left_out |= {"absent", "first_batch"}
    return {name: one for name, one in OPTIONS.items() if name not in left_out}
