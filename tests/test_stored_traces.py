"""Programs that commands keep: found again by all that decides them, never by less."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fedbilevel import experiments
from fedbilevel._evaluation import ACCELERATOR, PROCESSOR
from fedbilevel.errors import UntrustedCacheWarning
from fedbilevel.problem import Problem
from fedbilevel.problem.stored_rows import stored
from fedbilevel.runtime import counts, program
from fedbilevel.startup import (
    compiled_programs,
    own_cache,
    own_process,
    stored_traces,
)
from fedbilevel.startup.identity import UnnamedError, exact_description
from fedbilevel.startup.stored_traces import as_lists, from_lists, name_of
from fedbilevel.tasks.regularization import Folded

# Runs a command as users do; "blind" so that nothing can be traced, and "plain" without
# what is said of a process that runs commands alone.
COMMAND = """
import sys
how, words = sys.argv[1], sys.argv[2:]
if how == "blind":
    from fedbilevel.runtime import counts, program
    def traced(*_, **__):
        raise AssertionError("traced")
    program._rounds = program._setup = counts.count_calls = traced
sys.argv = ["fedbilevel", *words]
from fedbilevel.cli import main
from fedbilevel.cli.app import app
app() if how == "plain" else main()
"""
WORDS = ["run", "minimax", "--rounds", "3", "--clients", "2", "--json"]


def command(how: str, cache: Path, *more: str) -> dict | str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, how, *WORDS, *more],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return done.stderr
    told = json.loads(done.stdout)
    del told["seconds"]
    return told


@pytest.mark.slow
def test_a_command_that_ran_before_traces_nothing(tmp_path):
    """With another number it is the same program, and does not return the old one."""
    first = command("main", tmp_path, "--set", "lower_step=0.1")
    assert isinstance(first, dict), first
    again = command("blind", tmp_path, "--set", "lower_step=0.05")
    assert isinstance(again, dict), again
    kept = sorted((tmp_path / "fedbilevel" / "traced").iterdir())
    plain = command("plain", tmp_path, "--set", "lower_step=0.05")
    assert again == plain
    assert first["final"] != again["final"]
    assert sorted((tmp_path / "fedbilevel" / "traced").iterdir()) == kept
    other = command("blind", tmp_path, "--set", "lower_step=0.05", "--local-steps", "3")
    assert isinstance(other, str) and "traced" in other


@pytest.fixture
def in_a_command(monkeypatch, tmp_path):
    """Let this process be one that runs our commands alone."""
    monkeypatch.setattr(own_process, "began", time.time())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    own_cache._is_trusted.cache_clear()
    stored_traces._surroundings.cache_clear()
    stored_traces._is_settled.cache_clear()


def job(algorithm: str = "fedbio", seed: int = 0, local_steps: int = 2, **options):
    texts = {name: str(value) for name, value in options.items()}
    made = experiments.Experiment(
        "two-client", algorithm, local_steps=local_steps, options=texts
    )
    return made.build().job(seed)


def test_what_decides_a_program_is_in_its_name(in_a_command, monkeypatch, tmp_path):
    def name(one, evaluation=PROCESSOR) -> str | None:
        return name_of(program.advance, evaluation, one)

    first = job()
    own = name(first)
    assert own is not None and name(job()) == own
    # Numbers are inputs of a program.
    assert name(job(seed=7)) == own
    assert name(job(lower_step=0.02)) == name(job(lower_step=0.01))
    others = [
        name(replace(first, participants=1)),
        name(replace(first, x=jnp.zeros(3))),
        name(replace(first, x=first.x.astype(jnp.float16))),
        name(job(local_steps=3)),
        name(job("fedbioacc")),
        name(first, ACCELERATOR),
        name_of(program.setup, PROCESSOR, first),
    ]
    source = tmp_path / "source.py"
    source.write_text("one = 1")
    monkeypatch.setattr(stored_traces, "_source", lambda: [source])
    for text in ("one = 1", "one = 2"):
        source.write_text(text)
        os.utime(source, (0, 0))
        forget()
        others.append(name(first))
    jax.config.update("jax_default_matmul_precision", "highest")
    forget()
    others.append(name(first))
    jax.config.update("jax_default_matmul_precision", None)
    assert None not in others
    assert len({own, *others}) == 1 + len(others)


def test_source_that_changed_meanwhile_has_no_name(in_a_command, monkeypatch, tmp_path):
    source = tmp_path / "source.py"
    source.touch()
    monkeypatch.setattr(stored_traces, "_source", lambda: [source])
    later = time.time() + 9
    os.utime(source, (later, later))
    assert name_of(program.advance) is None
    os.utime(source, (0, 0))
    forget()
    assert name_of(program.advance) is not None


def test_only_our_commands_on_processors_have_names(in_a_command, monkeypatch):
    assert name_of(program.advance) is not None
    monkeypatch.setattr(own_process, "began", None)
    assert name_of(program.advance) is None
    monkeypatch.setattr(own_process, "began", time.time())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert name_of(program.advance) is None


@dataclass(frozen=True)
class OfATest:
    number: float = 1.0


def loss(x, y, rows):
    return jnp.sum(y)


@pytest.mark.parametrize(
    "part",
    [
        loss,
        lambda x, y, rows: 0.0,
        partial(loss, 1),
        OfATest(),
        OfATest,
        object(),
        eqx.nn.Lambda(lambda x: x),
        {"one": [loss]},
        stored(np.ones((3, 2)), [np.arange(2)])[0],
        jax.jit(loss),
        jax.custom_jvp(jnp.tanh),
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_others_wrote_has_no_name(in_a_command, part):
    with pytest.raises(UnnamedError):
        exact_description(part)
    assert name_of(program.advance, part) is None


def test_what_others_put_in_a_place_of_ours_has_no_name(in_a_command, monkeypatch):
    def put(x, y, rows):
        return 0.0

    put.__module__, put.__qualname__ = program.__name__, "advance"
    monkeypatch.setattr(program, "advance", put)
    with pytest.raises(UnnamedError):
        exact_description(put)


def test_a_users_loss_has_no_name(in_a_command):
    own = job()
    assert name_of(own) is not None
    assert name_of(replace(own, problem=Problem(loss, loss))) is None


@pytest.mark.parametrize(
    "one, other",
    [
        (partial(jnp.sum, axis=0), partial(jnp.sum, axis=1)),
        (eqx.nn.Lambda(jax.nn.relu), eqx.nn.Lambda(jax.nn.silu)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ([1, (2,)], [(1,), 2]),
        (1, 1.0),
        (True, 1),
        (np.arange(3), np.arange(3.0)),
        (np.arange(3), np.arange(1, 4)),
        (jnp.zeros((2, 3)), jnp.zeros((3, 2))),
        (np.dtype("float32"), np.dtype("float64")),
        (jnp.float32, jnp.bfloat16),
        (None, "None"),
    ],
)
def test_parts_that_differ_are_told_apart(one, other):
    assert exact_description(one) == exact_description(one)
    assert exact_description(one) != exact_description(other)


def test_what_a_function_holds_is_told():
    """Two functions of one place in the package differ by their closures alone."""
    one, same, other = (
        counts._known_times({0: np.arange(length)}) for length in (2, 2, 3)
    )
    assert exact_description(one) == exact_description(same) != exact_description(other)


def test_a_loss_that_is_a_method_is_told_by_what_it_belongs_to():
    one, same, other = (Folded(folds, 2, (0, 1)).lower for folds in (3, 3, 4))
    assert one == same != other
    assert exact_description(one) == exact_description(same) != exact_description(other)


def test_what_is_damaged_or_not_ours_is_not_read(in_a_command):
    stored_traces.write("one", b"content")
    assert stored_traces.read("one") == b"content"
    file = in_a_command / "fedbilevel" / "traced" / "one"
    whole = file.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert stored_traces.read("one") is None
    for text in (b"", whole[:-1], whole + b"x", b"{}\n", b"[]\nx", b"null\n", b"\xff"):
        file.write_bytes(text)
        assert stored_traces.read("one") is None
    assert stored_traces.read("nothing") is None


def test_the_oldest_are_forgotten(in_a_command, monkeypatch):
    monkeypatch.setattr(stored_traces, "_MOST", 2)
    folder = in_a_command / "fedbilevel" / "traced"
    for age, name in enumerate(["newest", "newer", "old", "oldest"]):
        stored_traces.write(name, b"content")
        os.utime(folder / name, (1000 - age, 1000 - age))
    stored_traces.write("now", b"content")
    assert {one.name for one in folder.iterdir()} == {"now", "newest"}


def test_a_folder_that_cannot_be_written_costs_no_run(in_a_command):
    (in_a_command / "fedbilevel").write_text("a file in the place of the folder")
    with pytest.warns(UntrustedCacheWarning, match="a file is where a folder"):
        stored_traces.write("one", b"content")
    assert stored_traces.read("one") is None


def _linked(place: Path) -> None:
    """Put a link in the place of something, to where it was moved."""
    moved = place.with_name(f"{place.name}-moved")
    place.rename(moved)
    place.symlink_to(moved.name)


def _linked_into_an_open_folder(place: Path) -> None:
    elsewhere = place.parents[2] / f"elsewhere-{place.name}"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    place.rename(elsewhere / "moved")
    place.symlink_to(elsewhere / "moved")


def _given_away(place: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place, 12345, 12345, follow_symlinks=False)


def _given_to_root_by_another(place: Path) -> None:
    """Link to a folder of this user, by a link of another's."""
    _linked(place)
    _given_away(place)


OTHERS = {
    "file of another": (_given_away, "{}/one"),
    "folder of another": (_given_away, "{}"),
    "parent of another": (_given_away, "{}/.."),
    "base of another": (_given_away, "{}/../.."),
    "link of another": (_given_to_root_by_another, "{}/.."),
    "linked file": (_linked, "{}/one"),
    "linked into an open folder": (_linked_into_an_open_folder, "{}"),
    "folder open to its group": (lambda place: place.chmod(0o770), "{}"),
    "folder open to all": (lambda place: place.chmod(0o707), "{}"),
    "open and sticky": (lambda place: place.chmod(0o1777), "{}"),
    "parent open": (lambda place: place.chmod(0o777), "{}/.."),
    "base open to its group": (lambda place: place.chmod(0o775), "{}/../.."),
    "no file": (lambda place: (place.unlink(), place.mkdir()), "{}/one"),
}


@pytest.fixture
def kept(in_a_command):
    """Keep something in both folders of programs; then look at them anew."""
    cache = in_a_command / "home" / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache)  # which `in_a_command` sets back
    before = jax.config.values["jax_compilation_cache_dir"]
    for kind in ("traced", "compiled"):
        folder = own_cache.cache_folder(kind)
        assert folder is not None and folder == cache / "fedbilevel" / kind
        assert [one.stat().st_mode & 0o777 for one in (folder, cache)] == [0o700] * 2
        (folder / "one").write_bytes(stored_traces._head(b"content") + b"content")
    assert stored_traces.read("one") == b"content"
    own_cache._is_trusted.cache_clear()
    yield cache / "fedbilevel"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("name", OTHERS)
def test_programs_that_others_could_have_written_are_not_used(kept, name):
    plant, where = OTHERS[name]
    for kind in ("traced", "compiled"):
        place = Path(os.path.normpath(where.format(kept / kind)))
        if place.is_relative_to(kept / kind) or kind == "traced":
            plant(place)
    with pytest.warns(UntrustedCacheWarning, match="traced are not used"):
        assert stored_traces.read("one") is None
    stored_traces.write("two", b"content")  # and nothing is said again
    assert not (kept / "traced" / "two").exists()
    with pytest.warns(UntrustedCacheWarning, match="compiled are not used"):
        compiled_programs.keep_compiled_programs()
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_folders_that_nobody_else_could_change_are_used(kept, mode):
    """A folder that others could read is closed; one like /tmp lies above it."""
    (kept / "traced" if mode == 0o755 else kept.parent).chmod(mode)
    assert stored_traces.read("one") == b"content"
    assert (kept / "traced").stat().st_mode & 0o777 == 0o700
    _linked(kept.parent)  # a link of one's own leads to one's own
    own_cache._is_trusted.cache_clear()
    assert stored_traces.read("one") == b"content"
    compiled_programs.keep_compiled_programs()
    assert jax.config.values["jax_compilation_cache_dir"] == str(kept / "compiled")


def test_lists_hold_what_modules_held():
    inner = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    tree = (inner, {"a": jnp.ones(2), "b": (inner, None)}, [jnp.zeros(1)])
    lists = as_lists(tree)
    plain = jax.tree.structure(lists, is_leaf=lambda part: isinstance(part, eqx.Module))
    assert plain == jax.tree.structure(jax.tree.unflatten(plain, range(6)))
    like = jax.tree.map(lambda leaf: 0, (inner, {"a": 0, "b": (inner, None)}, [0]))
    assert eqx.tree_equal(from_lists(lists, like), tree)
    # A whole part of the result may be left open.
    assert eqx.tree_equal(from_lists(lists, (like[0], 0, 0))[1], lists[1])
