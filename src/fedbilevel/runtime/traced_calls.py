"""Finds oracle calls in a traced program, and how often each of them runs.

Every oracle call is a named inner function of the program. Loops are multiplied by
their length, and a call on stacked points counts once per point. Of the branches of a
`lax.cond` the one that a turn takes counts. Where the turn alone does not decide, the
dearest one counts, and the count is "at most", as of a solve that a tolerance ends. Any
other loop of unknown length counts once, and the count is "at least".
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from fedbilevel.hypergradient.conjugate_gradient import AT_MOST
from fedbilevel.problem.stored_rows import fetched
from fedbilevel.runtime.job import Job

SAMPLES = ("upper_samples", "lower_samples")
# Inner functions that evaluate gradients, with what their outputs are shaped like.
_GRADIENTS = {
    "_upper_gradients": ("x", "y"),
    "_lower_gradient": ("y",),
    "_lower_gradients": ("x", "y"),
    "_lower_gradient_upper": ("x",),
    "_hessian_product": ("y",),
    "_cross_product": ("x",),
    "_unrolled_gradient": ("x",),
    "_unrolled_derivative": (),  # a number
}
_DRAWS = dict(zip(("_draw_upper", "_draw_lower"), SAMPLES, strict=True))
_PARTS = dict(zip(("_part_upper_", "_part_lower_"), SAMPLES, strict=True))

Bounds = dict[str, str]  # "at most" or "at least", by the name of a count
_Given = Callable[[], np.ndarray | None]  # an input's value in each turn, where known


def count_calls(
    traced: Any, job: Job, turns: np.ndarray | None = None
) -> tuple[Counter[str], Bounds]:
    """Return what a client's program calls, on the average over clients.

    With `turns` the last input of the program is the turn, and counts that differ by it
    are arrays with an entry for each of them.
    """
    walk = _Walk(job, turns is not None)
    given: list[_Given] = [_unknown] * len(traced.jaxpr.invars)
    if turns is not None:
        given[-1] = lambda: turns
    return walk.count(traced.jaxpr, given), walk.bounds


def _unknown() -> None:
    return None


class _Walk:
    """Goes through a program and all programs inside."""

    def __init__(self, job: Job, decides: bool) -> None:
        self.job, self.decides = job, decides
        self.bounds: Bounds = {}

    def count(self, jaxpr: Any, given: Sequence[_Given]) -> Counter[str]:
        """Return the calls of one execution, given some of the inputs."""
        found: Counter[str] = Counter()
        for equation in jaxpr.eqns:
            own = _called(equation, self.job)
            if own:
                found.update(own)
                continue
            inputs = [partial(_value, jaxpr, given, atom) for atom in equation.invars]
            found.update(self._inside(equation, inputs))
        return found

    def _inside(self, equation: Any, inputs: list[_Given]) -> Counter[str]:
        """Return the calls of the programs inside of an equation."""
        inner, kind = bodies(equation.params), equation.primitive.name
        if kind == "cond":
            branches = [self.count(one, inputs[1:]) for one in inner]
            return self._taken(branches, inputs[0])
        if kind == "scan":  # of its inputs only these are the same in every step
            fixed = _fixed_inputs(equation.params)
            inputs = inputs[:fixed] + [_unknown] * (len(inputs) - fixed)
        name = str(equation.params.get("name"))
        limited = name.startswith(AT_MOST)  # a loop of so many steps or fewer
        found: Counter[str] = Counter()
        for one in inner:
            alike = len(one.invars) == len(inputs) and kind != "while" and not limited
            known = inputs if alike else [_unknown] * len(one.invars)
            found.update(self.count(one, known))
        length = equation.params.get("length", 1)
        if limited or kind == "while":
            bound = "at most" if limited else "at least"
            self.bounds.update(dict.fromkeys(found, bound))
        if limited:
            length = int(name.removeprefix(AT_MOST))
        return Counter({name: length * number for name, number in found.items()})

    def _taken(self, branches: list[Counter[str]], choice: _Given) -> Counter[str]:
        """Return the calls of the branch that is taken, or the most of any."""
        every = {
            name: np.broadcast_arrays(*(branch[name] for branch in branches))
            for name in dict.fromkeys(name for branch in branches for name in branch)
        }
        differ = [n for n, many in every.items() if np.any(many != many[0])]
        taken = choice() if differ and self.decides else None
        if taken is not None:
            return Counter({n: np.choose(taken, many) for n, many in every.items()})
        self.bounds.update(dict.fromkeys(differ, "at most"))
        return Counter({n: np.max(many, axis=0) for n, many in every.items()})


def _fixed_inputs(scan: dict[str, Any]) -> int:
    """Return how many inputs of a loop, the first ones, are the same in every step."""
    if "num_consts" in scan:
        return scan["num_consts"]
    return len(scan["ft_in"].unpack()[0])  # its name since JAX 0.11


def _value(jaxpr: Any, given: Sequence[_Given], atom: Any) -> np.ndarray | None:
    """Return a variable of a program in each turn, if the turn alone decides it."""
    if isinstance(atom, Literal):
        return np.asarray(atom.val)
    needed, kept = {atom}, []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.insert(0, equation)
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    used = [number for number, one in enumerate(jaxpr.invars) if one in needed]
    values = [given[number]() for number in used]
    if not needed.isdisjoint(jaxpr.constvars) or any(one is None for one in values):
        return None
    inputs = [jaxpr.invars[number] for number in used]
    part = Jaxpr(
        (), inputs, (atom,), kept, debug_info=jaxpr.debug_info.with_unknown_names()
    )
    decided = jaxpr_as_fun(ClosedJaxpr(part, ()))
    each = jax.vmap(lambda *known: decided(*known)[0])
    return np.asarray(each(*values)) if values else np.asarray(decided()[0])


def _called(equation: Any, job: Job) -> dict[str, Any]:
    """Return what an equation is itself: one or several calls, or none."""
    name = equation.params.get("name")
    sizes = [variable.aval.size for variable in equation.outvars]
    if name in _GRADIENTS:
        return {name.removeprefix("_"): _points(name, sizes, job)}
    if name in _DRAWS:
        return {_DRAWS[name]: sizes[0] // _numbers_in_row(job, _DRAWS[name])}
    for prefix, kind in _PARTS.items():
        if isinstance(name, str) and name.startswith(prefix):
            most = int(name.removeprefix(prefix))
            return {
                kind: sizes[0] / _numbers_in_row(job, kind) * _real(job, kind, most)
            }
    return {}


def _real(job: Job, kind: str, most: int) -> float:
    """Return the share of a part's rows that are real, over all clients and parts.

    A program is traced for the largest client and the largest part.
    """
    held = job.data.upper_sizes if kind == SAMPLES[0] else job.data.lower_sizes
    sizes, largest = np.asarray(held), int(np.max(held))
    return float(sizes.mean()) / min(largest, most) / -(-largest // most)


def _numbers_in_row(job: Job, kind: str) -> int:
    rows = job.data.upper if kind == SAMPLES[0] else job.data.lower
    first = partial(jax.tree.map, lambda leaf: leaf[0, 0])
    row = jax.eval_shape(lambda level: fetched(first(level)), rows)
    return jax.tree.leaves(row)[0].size


def _points(name: str, sizes: list[int], job: Job) -> int:
    """Return at how many stacked points a call is evaluated."""
    like = [getattr(job, level) for level in _GRADIENTS[name]]
    expected = [leaf.size for leaf in jax.tree.leaves(like)] or [1]
    # Outputs that do not depend on the point stay unstacked; the others show.
    return max(size // one for size, one in zip(sizes, expected, strict=True))


def bodies(params: dict[str, Any]) -> list[Any]:
    """Return the programs inside of an equation."""
    found = []
    for value in params.values():
        value = getattr(value, "solve", value)  # a linear solve has more, unused
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                found.append(item)
            elif hasattr(item, "jaxpr"):
                found.append(item.jaxpr)
    return found
