"""Settings that must be made before JAX computes anything, and what is forgotten."""

import gc
import os
import signal
from importlib.metadata import version
from pathlib import Path

# Compiling is most of what these tests cost. Without LLVM's optimizations it is a fifth
# less, and with the older code generator for fusions half of the rest (LocalBSGVRM on
# three clients: 5.2 s against 2.5). XLA's own passes, which decide what is computed,
# stay; that which orders operations for many cores takes 7 % of the time. Splitting a
# tiny program into 32 parts for parallel code generation takes another fifth.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jax").startswith("0.10."):  # later ones have no older generator
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Lines of Python in compiled programs take a seventh of the time to compile them.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from fedbilevel.startup import own_process  # noqa: E402

pytest.register_assert_rewrite("tests.wiring")

# A busy machine fails no test, and a failure comes again.
settings.register_profile("again", deadline=None, derandomize=True, database=None)
settings.load_profile("again")

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that
# tests start, among them what must end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Shapes and types are annotations. With FEDBILEVEL_CHECK_SHAPES=1 they are checked at
# every call, which takes a third longer: `make test` sets it for the transcriptions,
# which run every listing.
if os.environ.get("FEDBILEVEL_CHECK_SHAPES"):
    from beartype import BeartypeConf, beartype
    from jaxtyping import install_import_hook

    checked = beartype(
        conf=BeartypeConf(is_pep484_tower=True)
    )  # an int is a float, too
    parts = "problem hypergradient estimators algorithms channels runtime".split()
    install_import_hook(
        [f"fedbilevel.{name}" for name in parts], "tests.conftest.checked"
    )

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Both test processes, the commands that they start, and the next run share what one of
# them compiled.
caches = Path(__file__).parent.parent / ".pytest_cache"
os.environ["XDG_CACHE_HOME"] = str(caches)
compiled = caches / "fedbilevel" / "compiled"  # where commands keep their programs, too
jax.config.update("jax_compilation_cache_dir", str(compiled))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
_device_count = jax.device_count


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests, which stay, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let simulations use both devices only where a module is about that.

    To spread a program over two takes a fourth of the time to compile it.
    """
    spread = item.get_closest_marker("two_devices") is not None
    jax.device_count = _device_count if spread else lambda: 1


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget all programs after a module, or a process grows to gigabytes.

    A command that was run in this process may have chosen another precision, and said
    that there is nothing but commands.
    """
    jax.config.update("jax_enable_x64", True)
    own_process.began = None
    if nextitem is None or item.path != nextitem.path:
        from fedbilevel.runtime import compilation

        compilation._programs.clear()
        eqx.clear_caches()
        jax.clear_caches()
        gc.collect()
