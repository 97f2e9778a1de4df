"""How clients are spread over devices, and a frozen model over some of them.

All clients taking part: every device holds its share of the data and of the client
states. A cohort: every device holds all data, and its share of the cohort's places, so
that devices stay equally busy for every draw. Places beyond the last client weigh 0.

Where several devices share one copy of the frozen model, they have the same clients and
the same states, and each holds a part of every large frozen array. XLA divides the work
on those among them, and adds what they must exchange.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from fedbilevel._types import Key
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Data
from fedbilevel.runtime import keys, mesh
from fedbilevel.runtime.job import Job, State, strongly_typed

AXIS, MODEL = "clients", "model"
# Of all frozen numbers, the part below which an array is copied to every device: those
# of norms and biases take no memory, and to divide them would divide all states, too.
_SMALL = 1 / 4096


def check_model_devices(count: int) -> None:
    """Raise unless so many devices can share a model, in every process."""
    held = Counter(one.process_index for one in jax.devices()[: jax.device_count()])
    for process, devices in sorted(held.items()):
        if not 1 <= count <= devices or devices % count:
            several = f" of process {process}" if len(held) > 1 else ""
            possible = [n for n in range(1, devices + 1) if devices % n == 0]
            raise InvalidInputError(
                f"model_devices={count}: the number of devices that share one copy of "
                f"the frozen model must divide the {devices} device(s){several}. "
                f"Possible: {', '.join(map(str, possible))}."
            )


def devices_for(participants: int, model_devices: int = 1) -> int:
    """Return how many devices, each with others by its side, work on participants.

    Among several processes it is as many as there are, since each process must have a
    part in the program, or one: then every process computes the same by itself.
    """
    check_model_devices(model_devices)
    most = jax.device_count() // model_devices
    everywhere = participants > 1 and jax.process_count() > 1
    return most if everywhere else min(most, participants)


class Layout(eqx.Module):
    """Counts that shape the compiled program; all static.

    Clients are spread over `devices`. In the place of each there are `model_devices`,
    which share a copy of the frozen model.
    """

    clients: int = eqx.field(static=True)
    participants: int = eqx.field(static=True)
    devices: int = eqx.field(static=True)
    at_once: int | None = eqx.field(static=True)
    sweeps: bool = eqx.field(static=True, default=False)
    model_devices: int = eqx.field(static=True, default=1)

    @property
    def everyone(self) -> bool:
        """Say whether all clients take part in every exchange."""
        return self.participants == self.clients

    def places(self, count: int) -> int:
        """Return on how many of so many participants one device works."""
        return -(-count // self.devices)

    def mesh(self) -> Mesh:
        """Return the devices on two axes: whose clients they have, what of the model.

        If they are those of one part of the clients, they are of this process.
        """
        shape = (self.devices, self.model_devices)
        some = jax.devices() if self.devices > 1 else jax.local_devices()
        some = some[: self.devices * self.model_devices]
        kinds = (jax.sharding.AxisType.Auto,) * 2
        return jax.make_mesh(shape, (AXIS, MODEL), axis_types=kinds, devices=some)

    def state_specs(self, state: State) -> State:
        """Say which axis of the state is spread."""
        spread = PartitionSpec()
        if self.everyone:
            spread = PartitionSpec(None, AXIS) if self.sweeps else PartitionSpec(AXIS)
        whole = _all(state, PartitionSpec())
        return replace(whole, clients=_all(state.clients, spread))

    def spreads(self, data: Data) -> bool:
        """Say whether each device has some of the clients; rows in one place stay."""
        return self.everyone and data.travels

    def data_spec(self, data: Data) -> PartitionSpec:
        """Say how the data are spread."""
        return PartitionSpec(AXIS) if self.spreads(data) else PartitionSpec()

    def frozen_specs(self, frozen: PyTree) -> PyTree:
        """Say how the devices of a model share every frozen array."""
        total = sum(leaf.size for leaf in jax.tree.leaves(frozen))

        def spec(leaf: Array) -> PartitionSpec:
            axis = _divided_axis(leaf.shape, self.model_devices)
            if axis is None or leaf.size < _SMALL * total:
                return PartitionSpec()
            return PartitionSpec(*[None] * axis, MODEL)

        return jax.tree.map(spec, frozen)

    @property
    def missing(self) -> int:
        """How many places stay without a client."""
        filled = self.devices * self.places(self.clients)
        return filled - self.clients if self.everyone else 0

    def pad(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Repeat the first client until the devices are filled."""
        missing = self.missing
        if missing == 0:
            return tree

        on_host = jax.default_backend() == "cpu" and jax.process_count() == 1

        def extend(leaf: Array) -> Array:
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            # NumPy compiles no program for every shape; a GPU keeps what it has.
            library = np if on_host and not is_key else jnp
            whole = library.asarray(leaf)
            first = library.take(whole, np.zeros(missing, np.int32), axis=axis)
            return jnp.asarray(library.concatenate([whole, first], axis=axis))

        return jax.tree.map(extend, tree)

    def place(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Put arrays on the devices."""
        devices = self.mesh()
        arrays, rest = eqx.partition(tree, eqx.is_array)
        if isinstance(specs, PartitionSpec):
            specs = _all(arrays, specs)

        def put(leaf: Array, spec: PartitionSpec) -> Array:
            return mesh.put(strongly_typed(leaf), NamedSharding(devices, spec))

        return eqx.combine(jax.tree.map(put, arrays, specs), rest)

    def place_job(self, job: Job) -> Job:
        """Pad the clients with weightless copies and put everything on the devices."""
        data = self.pad(job.data)
        if self.missing:
            weights = data.weights.at[self.clients :].set(0)
            data = eqx.tree_at(lambda one: one.weights, data, weights)
        placed = self.place(data, self.data_spec(data))
        rest = eqx.tree_at(lambda one: one.data, job, None)
        specs = _all(eqx.filter(rest, eqx.is_array), PartitionSpec())
        if self.model_devices > 1:
            own = self.frozen_specs(job.problem.frozen)
            specs = eqx.tree_at(lambda one: one.problem.frozen, specs, own)
        return replace(self.place(rest, specs), data=placed)

    def place_state(self, state: State) -> State:
        """Pad and put a state on the devices."""
        # A copy: the program takes over the memory of the state it is given.
        state = jax.tree.map(mesh.copied, state)
        axis = 1 if self.sweeps else 0
        padded = replace(state, clients=self.pad(state.clients, axis=axis))
        return self.place(padded, self.state_specs(padded))

    def fetch_state(self, state: State) -> State:
        """Return a state without padding, all of it in every process."""
        state = mesh.collected(state)
        cut = slice(None, self.clients)
        where = (slice(None), cut) if self.sweeps else cut
        clients = jax.tree.map(lambda leaf: leaf[where], state.clients)
        return replace(state, clients=clients)

    def on_devices(self, body: Callable, specs: tuple, out_specs: tuple) -> Callable:
        """Return a function that every device runs on its part, inside the program.

        What devices share of a model is divided by XLA. It may find that results are
        best left in parts, too, but the next call takes them whole.
        """
        if self.devices * self.model_devices == 1:
            return body
        devices = self.mesh()
        spread = jax.shard_map(
            body,
            mesh=devices,
            in_specs=specs,
            out_specs=out_specs,
            axis_names={AXIS} if self.model_devices > 1 else {AXIS, MODEL},
            check_vma=False,
        )
        if self.model_devices == 1:
            return spread
        whole = jax.tree.map(lambda spec: NamedSharding(devices, spec), out_specs)
        return lambda *parts: jax.lax.with_sharding_constraint(spread(*parts), whole)

    def device(self) -> Array | int:
        """Return the number of this device, inside the program."""
        return jax.lax.axis_index(AXIS) if self.devices > 1 else 0

    def total(self, value: Any) -> Any:
        """Add up what all devices hold, inside the program."""
        return jax.lax.psum(value, AXIS) if self.devices > 1 else value

    def least(self, value: Array) -> Array:
        """Return the least over all devices, inside the program."""
        return jax.lax.pmin(value, AXIS) if self.devices > 1 else value

    def together(self, tree: PyTree) -> PyTree:
        """Collect the places of all devices, inside the program."""
        if self.devices == 1:
            return tree
        return jax.tree.map(
            lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True), tree
        )

    def at_keys(
        self, function: Callable[[Key], Array], some: Sequence[Key]
    ) -> Iterable[Array]:
        """Return the values of a function at some keys, inside the program.

        Devices of one process share the work, each doing one of them.
        """
        count = len(some)
        if count == 1 or self.devices < count or jax.process_count() > 1:
            return keys.one_by_one(function, some)
        mine = jnp.stack(some)[self.device() % count]
        return self.together(function(mine)[None])[:count]

    def over_places(self, function: Callable, *stacks: PyTree) -> PyTree:
        """Map a function over the places of this device, `at_once` at a time."""
        count = jax.tree.leaves(stacks)[0].shape[0]
        if self.at_once is None or self.at_once >= count:
            return jax.vmap(function)(*stacks)
        size = None if self.at_once == 1 else self.at_once
        return jax.lax.map(lambda args: function(*args), stacks, batch_size=size)


def _divided_axis(shape: tuple[int, ...], parts: int) -> int | None:
    """Return the longest axis that can be divided into so many parts, if one can.

    Arrays of three axes or more are stacked along the first, which loops go through.
    """
    first = 1 if len(shape) > 2 else 0
    axes = [axis for axis in range(first, len(shape)) if shape[axis] % parts == 0]
    return max(axes, key=lambda axis: shape[axis], default=None)


def _all(tree: PyTree, spec: PartitionSpec) -> PyTree:
    return jax.tree.map(lambda _: spec, tree)
