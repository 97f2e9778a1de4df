"""Several processes, on one host or many, run one program over all their devices.

Every process is started with the same arguments, builds the same task, and puts its own
share of the clients on its own devices. Process 0 alone writes files. Values that
depend on a process - clocks, signals, files - are agreed on before they decide
anything, since all processes must run the same programs in the same order.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from fedbilevel.errors import InvalidInputError, OtherProcessError
from fedbilevel.runtime.rendezvous import meet

T = TypeVar("T")


def join(
    coordinator: str, processes: int, process: int, *, patience: float = 120.0
) -> None:
    """Make this process one of several that compute together.

    Call it in every process before the first computation, with the same `coordinator`,
    HOST:PORT of process 0, and the same number of `processes`; `process` counts them
    from 0. It returns when all are there, and raises after `patience` seconds. CPU
    devices exchange through gloo, GPUs through NCCL.

    Nothing is encrypted or authenticated: for trusted networks only.
    If a process dies, JAX ends the others: at once or, where they do not notice,
    100 seconds later. Continue from the last checkpoint.
    """
    host, port = _read_address(coordinator)
    if processes < 1 or not 0 <= process < processes:
        raise InvalidInputError(
            f"process {process} of {processes}: there must be at least 1, numbered "
            "from 0 to one less than how many there are."
        )
    if not patience > 0:
        raise InvalidInputError(f"patience={patience}: wait for more than 0 seconds.")
    if jax.distributed.is_initialized():
        raise InvalidInputError("this process has joined others already: join once.")
    if processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take over SIGTERM, at which a run stops in order.
    jax.config.update("jax_enable_preemption_service", False)
    meet(host, port, processes, process, patience)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(patience)),
        )
    except RuntimeError as error:
        raise InvalidInputError(
            f"process {process} could not join {coordinator}: {error} Join before "
            "anything is computed, and choose a port that is free on process 0's host."
        ) from error


def _read_address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise InvalidInputError(
            f"coordinator '{coordinator}': write HOST:PORT of process 0, with a port "
            "from 1 to 65535, for example 10.0.0.1:29400."
        )
    return host, int(port)


def is_first() -> bool:
    """Say whether this is process 0, which writes what is written."""
    return jax.process_index() == 0


def decided_by_first(*values: int) -> list[int]:
    """Return the values of process 0."""
    if jax.process_count() == 1:
        return list(values)
    return [int(value) for value in _gather(np.asarray(values, np.int32))[0]]


def any_process(here: bool) -> bool:
    """Say whether something is true in any process."""
    return bool(_gather(np.asarray(here)).any())


def require_same(describe: Callable[[], str], what: str) -> None:
    """Raise unless all processes describe something alike; one alone is not asked."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(describe().encode()).digest()
    every = _gather(np.frombuffer(digest, np.uint8))
    odd = np.flatnonzero((every != every[0]).any(axis=1))
    if len(odd):
        raise InvalidInputError(
            f"process {odd[0]} has another {what} than process 0. Start all processes "
            "with the same arguments, data, files and versions."
        )


def on_all(action: Callable[[], T]) -> T:
    """Do something in every process; where one fails, all raise."""
    if jax.process_count() == 1:
        return action()
    result, failed = None, None
    try:
        result = action()
    except Exception as error:
        failed = error
    every = _gather(np.asarray(failed is not None))
    if failed is not None:
        raise failed
    if every.any():
        raise OtherProcessError(
            f"process {np.argmax(every)} failed, so this one stops, too. See the error "
            "message of that process."
        )
    return result  # pyright: ignore[reportReturnType]


def on_first(action: Callable[[], object]) -> None:
    """Let process 0 do something while the others wait; if it fails, all raise."""
    on_all(action if is_first() else lambda: None)


def put(leaf: Array, sharding: Sharding) -> Array:
    """Put an array that every process holds on the devices, each its own share."""
    if sharding.is_fully_addressable:
        spread = len(sharding.device_set) > 1
        return jax.device_put(_on_host(leaf) if spread else leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        plain = put(jr.key_data(leaf), sharding)
        return jr.wrap_key_data(plain, impl=jr.key_impl(leaf))
    # Not `device_put`, which sends every array around to see that it is the same.
    here = np.asarray(leaf)
    return jax.make_array_from_callback(here.shape, sharding, lambda part: here[part])


@contextmanager
def made_on_host() -> Iterator[None]:
    """Let arrays that are made here lie in the memory of the host, not of a device.

    Programs move them to where they run, and `put` each part to its own device.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def copied(leaf: Array) -> Array:
    """Return an array with memory of its own."""
    here = _on_host(leaf)
    return jnp.copy(leaf) if here is leaf else jax.device_put(np.array(here))


def _on_host(leaf: Array) -> Array | np.ndarray:
    """Return an array in the memory of a CPU as NumPy's, any other as it is.

    To cut or copy an array of its own JAX compiles a program, one for every shape.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    near = all(device.platform == "cpu" for device in leaf.devices())
    return np.asarray(leaf) if near else leaf


def collected(tree: PyTree) -> PyTree:
    """Fetch arrays of which other processes hold a part; leave the others alone."""

    def whole(leaf: Array) -> Array | np.ndarray:
        if leaf.is_fully_addressable:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, tree)


def _gather(values: np.ndarray) -> np.ndarray:
    """Return the values of all processes, one row each."""
    count = jax.process_count()
    if count == 1:
        return values[None]
    # One device of each process, which may have different numbers of them.
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first[index] for index in range(count)]), ("processes",))
    spread = NamedSharding(mesh, PartitionSpec("processes"))
    rows = jax.make_array_from_callback(
        (count, *values.shape), spread, lambda _: values[None]
    )
    try:
        return collected(rows)
    except RuntimeError as error:
        raise OtherProcessError(
            f"the processes cannot exchange: {error}. Either one ended, or they "
            "do not reach each other: with gloo, the own name of every host must lead "
            "to an address that the others reach, and not to 127.0.1.1."
        ) from error
