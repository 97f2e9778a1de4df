"""Settings that must be made before JAX computes anything."""

import os
from pathlib import Path

# Compiling is most of what these tests cost; without LLVM's optimizations it is a fifth
# less. XLA's own passes, which decide what is computed, stay.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Both test processes, and the next run, share what one of them compiled.
cache = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
