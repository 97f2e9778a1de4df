"""Programs are traced here, compiled in a thread, and by options that hold."""

import threading
from dataclasses import replace

import jax.numpy as jnp
import pytest

from fedbilevel import _tree
from fedbilevel._evaluation import ACCELERATOR, PROCESSOR
from fedbilevel.runtime import compilation
from fedbilevel.runtime.compilation import Asked, compiled, prepare
from fedbilevel.startup import compiled_programs


def program(number: float) -> Asked:
    """Return the program of a function that no other test has."""
    return Asked(
        lambda a, b: a * number + b, jnp.ones(2), (jnp.ones(2),), (), PROCESSOR
    )


def test_what_compiles_meanwhile_is_waited_for(monkeypatch):
    asked, here = program(3.0), threading.get_ident()
    goes_on, threads = threading.Event(), []
    finished = compilation._finished

    def late(*parts):
        assert goes_on.wait(60)
        threads.append(threading.get_ident())
        return finished(*parts)

    monkeypatch.setattr(compilation, "_finished", late)
    # It returns once the program is traced: nobody has let it compile.
    assert prepare(asked) >= 0
    prepare(asked)
    goes_on.set()
    run, _ = compiled(asked)
    assert run(jnp.ones(2), jnp.ones(2)).tolist() == [4.0, 4.0]
    assert threads and threads != [here] and len(threads) == 1
    assert compiled(asked) == (run, 0.0)


def test_what_fails_meanwhile_is_told_and_tried_again(monkeypatch):
    asked, calls, goes_on = program(5.0), [], threading.Event()
    finished = compilation._finished

    def once(*parts):
        assert goes_on.wait(60)
        calls.append(parts)
        if len(calls) == 1:
            raise MemoryError("no room")
        return finished(*parts)

    monkeypatch.setattr(compilation, "_finished", once)
    prepare(asked)
    made, mine = compilation._claimed(asked.identity())
    assert not mine
    goes_on.set()
    with pytest.raises(MemoryError, match="no room"):
        made.result()
    run, _ = compiled(asked)
    assert run(jnp.ones(2), jnp.ones(2)).tolist() == [6.0, 6.0]
    assert len(calls) == 2


def test_what_cannot_be_traced_is_told_at_once():
    def fails(a):
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        prepare(Asked(fails, jnp.ones(2), (), (), PROCESSOR))


@pytest.mark.parametrize(
    ("flags", "backend", "level"),
    [
        ("", "cpu", 2),
        ("--xla_dump_to=x", "cpu", 2),
        ("--xla_backend_optimization_level=0", "cpu", None),
        ("", "gpu", None),
    ],
)
def test_a_level_that_flags_say_holds(monkeypatch, flags, backend, level):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(compiled_programs.jax, "default_backend", lambda: backend)
    found = compiled_programs.lasting(ACCELERATOR)
    assert found.get("xla_backend_optimization_level") == level
    assert "xla_disable_hlo_passes" not in found
    whole = compiled_programs.lasting(replace(PROCESSOR, splits_kernels=False))
    assert whole["xla_disable_hlo_passes"] == "cpu-parallel-task-assigner"


@pytest.mark.parametrize("small", [False, True])
def test_small_kernels_compile_by_the_older_generator(small):
    found = compiled_programs.lasting(replace(PROCESSOR, small_kernels=small))
    older = {"xla_cpu_use_fusion_emitters": False} if small else {}
    assert {name: found[name] for name in found if "emitters" in name} == older


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("where", ["small", "other", "half", "large"])
def test_one_number_that_is_not_finite_is_found_in_any_leaf(where, wrong):
    tree = {
        "small": jnp.ones((2, 3)),
        "other": jnp.ones(()),
        "half": jnp.ones(4, jnp.float16),
        "large": jnp.ones((_tree._SMALL, 2)),
        "count": jnp.arange(3),
        "none": jnp.ones((0, 2)),
    }
    assert bool(_tree.all_finite(tree)) and bool(_tree.all_finite({}))
    last = (-1,) * tree[where].ndim
    assert not bool(_tree.all_finite({**tree, where: tree[where].at[last].set(wrong)}))
