"""The simulator with what clients keep on a disk: a round holds its own clients alone.

Between two rounds the host writes what the clients of one keep and reads that of the
next. The cohort follows from the keys, so it is known before a round.
"""

import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fedbilevel._blocks import is_any
from fedbilevel.algorithms import Phase, Phases
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem.stored_rows import StoredRows
from fedbilevel.runtime import keys, program
from fedbilevel.runtime.client_files import ClientFiles
from fedbilevel.runtime.compilation import Asked
from fedbilevel.runtime.contract import Advance, Found, Span
from fedbilevel.runtime.driver import rounds_in_python
from fedbilevel.runtime.exchange import start_kept, start_state
from fedbilevel.runtime.job import Job, Kept, State, start_server
from fedbilevel.runtime.simulator import SimulatorRuntime, first_failure
from fedbilevel.runtime.stopping import SPARSE

_NEVER = SPARSE - 1  # rounds between two measurements


@dataclass(frozen=True)
class OnDisk:
    """The server's state, and the files of what clients keep, which rounds change.

    `columns` is what the program of the last round measured.
    """

    server: PyTree
    files: ClientFiles
    columns: dict[str, np.ndarray] = field(default_factory=dict)


class DiskSimulatorRuntime(SimulatorRuntime):
    """The simulator for many stateful clients of which few take part.

    What they keep is in files without names in `folder`, and gone with the run. Every
    round reads and writes what its own clients keep, and the numbers are those of the
    simulator. This is worth it only where the states of all clients do not fit into
    the memory: the host does something between two rounds.
    """

    def __init__(
        self, job: Job, folder: Path | str, clients_at_once: int | None = None
    ) -> None:
        _check_use(job)
        super().__init__(job, clients_at_once)
        self.folder = Path(folder)

    def blank(self) -> State:
        """Return the shapes of a state, which does not fit into memory."""
        return eqx.filter_eval_shape(start_state, self.job)

    def start(self) -> tuple[Any, Found | None]:
        """Return the state before round 0, after any setup phases."""
        server, first = self._beginning()
        state = OnDisk(server, self._new_files(first))
        if not self.job.algorithm.setup():
            return state, None
        asked, held = self._held(keys.SETUP, 0, state)
        after, failure = self._set_up(held)
        state.files.write(asked, after.clients)
        return OnDisk(after.server, state.files), first_failure(failure)

    def advance(self, state: Any, span: Span) -> Advance:
        """Run some rounds, one after the other."""

        def one_round(state: OnDisk, index: int) -> tuple[OnDisk, Found | None]:
            asked, held = self._held(keys.ROUNDS, index, state)
            rounds = self._asked_rounds(held, self._alone(span, index))
            after, (rows, used, failure, *_) = self._run(rounds)
            state.files.write(asked, after.clients)
            new = {name: np.asarray(rows[name][0]) for name in rows if int(used)}
            return OnDisk(after.server, state.files, new), first_failure(failure)

        method = self.job.algorithm
        return rounds_in_python(span, state, one_round, self._measure, method)

    def prepare(self, span: Span) -> None:
        """Trace what `advance` will run, and let it compile meanwhile."""
        super().prepare(self._alone(span, span.start))

    def fetch(self, state: Any) -> State:
        """Return the state; what clients keep is read when it is looked at."""
        server = jax.tree.map(np.asarray, state.server)
        return State(server, state.files.whole())

    def load(self, state: State) -> Any:
        """Take a fetched state."""
        files = self._new_files(self._beginning()[1])
        files.fill(state.clients)
        return OnDisk(self._placed(state.server), files)

    def _beginning(self) -> tuple[PyTree, Kept]:
        """Return what the server carries, and a client keeps, before all exchanges."""
        asked = Asked(_first, self.job, (), (), self._evaluation, brief=True)
        server, kept = self._run(asked)
        return self._placed(server), jax.tree.map(np.asarray, kept)

    def _new_files(self, first: Kept) -> ClientFiles:
        files = ClientFiles(self.folder, first, self.job.clients)
        # Programs keep what they read from, but no program runs then.
        weakref.finalize(self, files.close)
        return files

    def _first_state(self) -> State:
        """Return a state of the shapes that a round has."""
        server, first = self._beginning()
        most = _most_asked(self.job, self.job.algorithm.phases())
        kept = jax.tree.map(lambda row: np.broadcast_to(row, (most, *row.shape)), first)
        return self._state(server, kept, np.arange(0), most)

    def _held(self, stage: int, index: int, state: OnDisk) -> tuple[list[int], State]:
        """Return the clients of a round, or of the setup, and the state with them."""
        most = _most_asked(self.job, self.job.phases(stage))
        arguments = (stage, jnp.asarray(index, jnp.int32))
        attending = Asked(program.attending, self.job, arguments, (), self._evaluation)
        asked = np.flatnonzero(np.asarray(self._run(attending)))
        # Places that are left over have somebody's state, too: no number is strange.
        filled = np.concatenate([asked, np.full(most - len(asked), asked[0])])
        held = self._state(state.server, state.files.read(filled), asked, most)
        return asked.tolist(), held

    def _alone(self, span: Span, index: int) -> Span:
        """Return one round of a span, after which the host decides whether to continue.

        Blocks that clients have of their own are measured when all are in their files.
        """
        if is_any(self.job.private):
            never = np.zeros_like(span.limits)
            span = replace(span, every=_NEVER, total=0, limits=never)
        return replace(span, start=index, stop=index + 1, ends=False)

    def _state(
        self, server: PyTree, kept: PyTree, asked: np.ndarray, most: int
    ) -> State:
        """Return a state on the devices with what some clients keep."""
        # Absent clients and padding have a place beyond the last.
        places = np.full(self.job.clients + 1, most, np.int32)
        places[asked] = np.arange(len(asked), dtype=np.int32)
        return State(server, *self._placed((kept, None, places)))

    def _measure(self, state: OnDisk, index: int) -> dict[str, np.ndarray]:
        """Return what a round measured, or measure where clients have own blocks.

        Those of all clients are read from their files then, some at a time.
        """
        if not is_any(self.job.private):
            return state.columns
        numbers = jnp.arange(self.job.clients, dtype=jnp.int32)
        sources = state.files.sources.own
        own = jax.tree.map(lambda source: StoredRows(numbers, source), sources)
        whole = State(state.server, self._placed(Kept(None, own)))
        asked = replace(self._asked_for(program.measure, whole), donate=())
        _, columns = self._run(asked)
        return {name: np.asarray(value) for name, value in columns.items()}

    def _placed(self, tree: Any) -> Any:
        return self.layout.place(jax.tree.map(jnp.asarray, tree), PartitionSpec())


def _first(job: Job) -> tuple[PyTree, Kept]:
    return start_server(job), start_kept(job)


def _most_asked(job: Job, phases: Phases) -> int:
    """Return how many clients are asked in a round, or in the setup, at most."""

    def asked(entries: Phases) -> int:
        return sum(
            job.cohort(one) if isinstance(one, Phase) else one.times * asked(one.phases)
            for one in entries
        )

    return min(job.clients, asked(phases))


def _check_use(job: Job) -> None:
    """Raise where states on a disk would take no less memory, or cannot be there."""
    name = job.algorithm.title
    if not jax.tree.leaves(eqx.filter_eval_shape(start_kept, job)):
        raise InvalidInputError(
            f"clients of `{name}` keep nothing between exchanges, so that there is "
            "nothing to store. Leave out the folder of their states."
        )
    whole = [one.name for one in job.every_phase().values() if one.everyone]
    if whole or job.participants == job.clients:
        where = f"in '{whole[0]}'" if whole else "in every exchange"
        raise InvalidInputError(
            f"all clients of `{name}` take part {where}, so that the states of all are "
            "needed at the same time. Let fewer take part (--participants), or leave "
            "out the folder of their states."
        )
    if jax.process_count() > 1:
        raise InvalidInputError(
            "states of clients on a disk are for one process. Leave out their folder, "
            "or run in one process."
        )
