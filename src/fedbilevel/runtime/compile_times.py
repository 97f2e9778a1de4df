"""How long programs take to compile here, as far as earlier ones tell.

Seconds grow with the equations of a program. Their ratio is kept beside the compiled
programs, where `configure` has put these, and the latest programs count most.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import jax

from fedbilevel._files import write_atomically
from fedbilevel.runtime import mesh
from fedbilevel.runtime.configuration import cache_folder
from fedbilevel.runtime.counts import bodies

__all__ = ["equations", "expected", "loaded", "note"]

_KEPT = 0.7  # of what is known, by every program that is compiled
_loads = [0]  # programs that JAX took from its cache in this process


def _heard(event: str, **about: Any) -> None:
    del about
    _loads[0] += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_heard)


def loaded() -> int:
    """Return how many programs were taken from the cache instead of compiled."""
    return _loads[0]


def equations(jaxpr: Any) -> int:
    """Return how many equations a program has, those of its parts included."""
    parts = [body for one in jaxpr.eqns for body in bodies(one.params)]
    return len(jaxpr.eqns) + sum(equations(part) for part in parts)


def expected(size: int) -> float | None:
    """Return the seconds that a program of so many equations may take, if known."""
    known = _read()
    return None if known is None else size * known[1] / known[0]


def note(size: int, seconds: float) -> None:
    """Remember how long a program took that was compiled, and not loaded."""
    file = _file()
    if file is None or not mesh.is_first():
        return
    before = _read() or (0.0, 0.0)
    now = (_KEPT * before[0] + size, _KEPT * before[1] + seconds)
    text = json.dumps({"equations": now[0], "seconds": now[1]})
    # A folder that cannot be written costs an estimate, not a run.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda out: out.write(text.encode()))


def _file() -> Path | None:
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    ours = cache_folder()
    return ours.parent / "compile-times.json" if kept == str(ours) else None


def _read() -> tuple[float, float] | None:
    """Return equations and seconds; nothing where the file is none of ours."""
    file = _file()
    try:
        held = json.loads(file.read_text()) if file is not None else {}
        found = float(held["equations"]), float(held["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = all(math.isfinite(value) and value > 0 for value in found)
    return found if sound else None
