"""Describes parts of a run by all that they hold: losses, problems, whole jobs.

`description` serves where only what a user wrote may differ: an object that it cannot
look into is described by its name. `exact_description` serves where two parts of one
description must compute the same, in this process or another: whatever it cannot be
sure of is an error. Stored traces are found by the second; alone it gains nothing.
"""

import hashlib
import inspect
import sys
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, EllipsisType, FunctionType, MethodType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

# Contents of these packages are known by their names and versions.
_LIBRARIES = ("fedbilevel", "equinox", "jax", "jaxlib", "jaxtyping", "numpy", "optax")
_KNOWN = {*_LIBRARIES, *sys.stdlib_module_names}
_COMPILED = type(jax.jit(lambda: None))


class UnnamedError(Exception):
    """A part that may differ from another one of the same description."""


def description(part: Any) -> Any:
    """Return instructions, constants, and all that a part holds, as lists of text."""
    return _described(part, exact=False)


def exact_description(part: Any) -> Any:
    """Return the same; raise `UnnamedError` where that might not be all.

    Functions and classes are those of this package and of the libraries it builds on.
    """
    return _described(part, exact=True)


def _described(part: Any, exact: bool, above: tuple[int, ...] = ()) -> Any:
    """Go through a part; a function that calls itself is met a second time."""
    if isinstance(part, str | int | float | EllipsisType | None):
        return repr(part)
    if eqx.is_array_like(part):
        return _contents(part)
    if id(part) in above:
        return "above"

    def inside(*parts: Any) -> list:
        return [_described(one, exact, (*above, id(part))) for one in parts]

    if isinstance(part, tuple | list):
        return inside(*part)
    if isinstance(part, dict):
        return ["dict", *inside(*part.items())]
    if isinstance(part, CodeType):
        return [part.co_code.hex(), part.co_names, inside(*part.co_consts)]
    if not exact or type(part) is _COMPILED:
        part = inspect.unwrap(part)  # others may hold more than one function
    usual = getattr(part, "__qualname__", type(part).__qualname__)
    name = _exact_name(part) if exact else usual
    if isinstance(part, MethodType):
        return [name, *inside(part.__func__, part.__self__)]
    if isinstance(part, FunctionType):
        cells = [cell.cell_contents for cell in part.__closure__ or ()]
        more = inside(part.__kwdefaults__) if part.__kwdefaults__ else []
        return [name, *inside(part.__code__, part.__defaults__, *cells), *more]
    if isinstance(part, partial):
        return inside(part.func, *part.args, *sorted(part.keywords.items()))
    if is_dataclass(part) and not isinstance(part, type):
        return [name, *inside(*(getattr(part, one.name) for one in fields(part)))]
    return name


def _exact_name(part: Any) -> str:
    """Return where an object is found, or raise."""
    if isinstance(part, MethodType):
        return "method"
    if isinstance(part, np.dtype):
        return str(part)
    if isinstance(part, FunctionType):
        # JAX calls its functions by where they are to be found, not where they are.
        module = part.__globals__["__name__"]
        if _is_known(module) and vars(sys.modules[module]) is part.__globals__:
            return f"{module}:{part.__qualname__}"
        raise UnnamedError(f"a function of {module}")
    instance = is_dataclass(part) or isinstance(part, partial)
    return _place(type(part) if instance and not isinstance(part, type) else part)


def _contents(part: Any) -> list:
    if isinstance(part, jax.Array) and jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        part = jr.key_data(part)
    value = np.ascontiguousarray(part)
    # As bytes: bfloat16 has no buffer of its own.
    digest = hashlib.sha256(value.tobytes())
    return [str(value.dtype), value.shape, digest.hexdigest()]


def _is_known(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] in _KNOWN


def _place(part: Any) -> str:
    """Return the module and name under which exactly this object is found."""
    module = getattr(part, "__module__", None)
    name = getattr(part, "__qualname__", getattr(part, "__name__", None))
    found = sys.modules.get(str(module)) if _is_known(module) else None
    for step in name.split(".") if isinstance(name, str) else ():
        found = getattr(found, step, None)
    if found is not part or found is None:
        raise UnnamedError(f"{type(part).__qualname__} {name or ''} of {module}")
    return f"{module}:{name}"
