"""Compiled programs: kept on disk, and with less effort for those that run once.

A command that ran before need not compile again. This gains three quarters of a start:
one round of `two-client` takes 10.8 processor seconds without compiled programs on
disk, and 2.6 with them. The options gain 15 % of a first start, which takes 19
processor seconds of `regularization`: LLVM's second level compiles the rounds in 7.0
instead of 7.9, and what runs once before them takes 0.9 instead of 2.7 without
optimizations.
"""

import os
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedbilevel._evaluation import Evaluation
from fedbilevel.startup.own_cache import cache_folder

_HAS_TWO = jax.__version_info__ < (0, 11)
# Later versions have no other generator of code.
_OLDER: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False} if _HAS_TWO else {}


def keep_compiled_programs() -> None:
    """Let JAX keep the programs of this process, and find those of earlier ones."""
    folder = cache_folder("compiled")
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    # Every program counts: the default skips those that compile in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Lines of Python inside of compiled programs take time to compile, and users do not
    # read them; errors have their lines all the same.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # JAX looks for a cache once, at its first compilation, which may be over.
    compilation_cache.reset_cache()


def hurried(level: int) -> dict[str, Any] | None:
    """Return options of the compiler for a program that runs once.

    LLVM's optimizations, of `level` 0 to 3, and the newer code generator for fusions
    take longer than such a program does: on a CPU they are most of what compiling
    costs. Elsewhere there are none.
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": level, **_OLDER}


def lasting(evaluation: Evaluation) -> dict[str, Any]:
    """Return options of the compiler for a program that runs for long.

    XLA divides a kernel of some 100 KB, such as a gather of rows, among threads. Where
    every core has a device that works by itself, the kernel then waits for a core: the
    gather of 32 rows takes 46 us of a core in place of 18, and a client step 930 us
    in place of 704. LLVM's third level takes up to a quarter longer than its second,
    and what it makes of our programs is not faster; flags of XLA that say a level hold.
    Where kernels are small the older code generator compiles in two thirds of the time,
    and rounds take as long: a network 6-16-3 starts in 11.8 processor seconds in place
    of 18.0 (one busy machine, in turns), and a round takes 1.37 ms in place of 1.35.
    """
    options = {}
    if evaluation.small_kernels:
        options |= _OLDER
    if not evaluation.splits_kernels:
        options["xla_disable_hlo_passes"] = "cpu-parallel-task-assigner"
    leveled = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() == "cpu" and not leveled:
        options["xla_backend_optimization_level"] = 2
    return options
