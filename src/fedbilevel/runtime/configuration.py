"""Process-wide settings of JAX, best made before the first computation."""

import os
import warnings

import jax

from fedbilevel.errors import ConfigurationWarning, InvalidInputError
from fedbilevel.startup.compiled_programs import keep_compiled_programs


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
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        there = jax.local_device_count()
        if jax.default_backend() == "cpu" and there < devices:
            warnings.warn(
                f"JAX has computed already, so that it stays with {there} device(s) of "
                f"this machine's {devices} cores. Precision and cache are as asked. To "
                "use all cores, call `fedbilevel.configure()` before the first "
                "computation: in a notebook, restart the kernel and call it first.",
                ConfigurationWarning,
                stacklevel=2,
            )
    # XLA's thread pool has NPROC threads. Each device holds one while it waits, and a
    # batch of dense solves waits for others: without spare ones it would wait forever.
    os.environ.setdefault("NPROC", str(2 * devices))
    keep_compiled_programs()
