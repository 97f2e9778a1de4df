"""Process-wide settings of JAX, best made before the first computation."""

import os
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedbilevel.errors import ConfigurationWarning, InvalidInputError

__all__ = ["cache_folder", "configure"]


def cache_folder() -> Path:
    """Return where compiled programs are kept between processes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedbilevel" / "compiled"


def configure(precision: str = "float32", cores: int | None = None) -> None:
    """Choose the precision, use every core, and keep compiled programs on disk.

    XLA runs the body of a loop on one core, so the simulator spreads clients over one
    virtual CPU device per core; `cores` limits them. A GPU is used if there is one.
    Once JAX has computed something, the number of devices cannot change: a warning then
    says how many there are, and all else is done.
    """
    if precision not in ("float32", "float64"):
        raise InvalidInputError(f"precision '{precision}': choose float32 or float64.")
    jax.config.update("jax_enable_x64", precision == "float64")
    devices = cores or os.cpu_count() or 1
    _use_devices(devices)
    # XLA's thread pool has NPROC threads. Each device holds one while it waits, and a
    # batch of dense solves waits for others: without spare ones it would wait forever.
    os.environ.setdefault("NPROC", str(2 * devices))
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    # Every program counts: the default skips those that compile in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Lines of Python inside of compiled programs take time to compile, and nobody who
    # runs a method reads them; errors have their lines all the same.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # JAX looks for a cache once, at its first compilation, which may be over.
    compilation_cache.reset_cache()


def _use_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        there = jax.local_device_count()
        if jax.default_backend() != "cpu" or there >= count:
            return
        warnings.warn(
            f"JAX has computed already, so that it stays with {there} device(s) of "
            f"this machine's {count} cores. Precision and cache are as asked. To use "
            "all cores, call `fedbilevel.configure()` before the first computation: in "
            "a notebook, restart the kernel and call it first.",
            ConfigurationWarning,
            stacklevel=3,
        )
