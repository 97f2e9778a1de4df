"""Keeps the checkpoints of a run, and the time that it took."""

import time
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np

from fedbilevel._folders import CHECKPOINT, how_to_continue
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.runtime import checkpoint, mesh
from fedbilevel.runtime.checkpoint import Snapshot
from fedbilevel.runtime.contract import Runtime, failure


class Checkpoints(eqx.Module):
    """Where to keep checkpoints, and how often: by rounds, by seconds, or both.

    `part_of` is the folder of the study that the run is a part of.
    """

    folder: Path = eqx.field(converter=Path)
    every_rounds: int | None = None
    every_seconds: float | None = None
    part_of: Path | None = None

    def __check_init__(self) -> None:
        for name in ("every_rounds", "every_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                option = name.replace("every", "checkpoint")
                raise InvalidInputError(
                    f"{option}={value} must be above 0, or None for never."
                )

    def due(self, rounds: int, seconds: float) -> bool:
        """Say whether one is due, given what passed since the last."""
        by_rounds = self.every_rounds is not None and rounds >= self.every_rounds
        by_time = self.every_seconds is not None and seconds >= self.every_seconds
        return by_rounds or by_time


class Keeper:
    """Keeps checkpoints and the time, for one call of `execute`."""

    def __init__(
        self,
        runtime: Runtime,
        checkpoints: Checkpoints | None,
        every: int,
        first: Snapshot | None = None,
    ) -> None:
        self.runtime, self.checkpoints, self.first = runtime, checkpoints, first
        self.fingerprint = runtime.fingerprint(every) if checkpoints else ""
        self.began = self.kept_at = time.perf_counter()
        # Programs may have been prepared before, which is no part of this time.
        self.prepared = runtime.compile_seconds
        self.kept_round, self.last_good = -1, None
        self.earlier: dict[str, float] = {}

    def begin(self, rounds: int) -> tuple[Any, dict[str, np.ndarray], int]:
        """Return the last checkpoint, what was handed over, or the start."""
        held = mesh.on_all(self._last)
        where = self.checkpoints and self.checkpoints.folder
        mesh.require_same(lambda: str(held and held.round), f"checkpoint in {where}")
        if held is None and self.first is not None:
            one = self.first
            return self.runtime.load(one.state), one.columns, one.round
        if held is None:
            state, found = self.runtime.start()
            if found is not None:
                raise failure(self.runtime.job, found)
            return state, {}, 0
        if held.round > rounds:
            raise CheckpointError(
                f"the checkpoint is already after round {held.round}, beyond the "
                f"{rounds} asked for. Ask for at least as many."
            )
        self.kept_round, self.earlier = held.round, held.seconds
        self.last_good = f"{self.checkpoints.folder}, after round {held.round}"  # pyright: ignore[reportOptionalMemberAccess]
        return self.runtime.load(held.state), held.columns, held.round

    def _last(self) -> Snapshot | None:
        folder = self.checkpoints and self.checkpoints.folder
        if folder is None or not (folder / CHECKPOINT).exists():
            return None
        return checkpoint.load(folder, self.runtime.blank(), self.fingerprint)

    def latest_stop(self) -> float:
        """Return the round at which the next checkpoint by rounds is due."""
        every = self.checkpoints.every_rounds if self.checkpoints else None
        return max(self.kept_round, 0) + every if every else float("inf")

    def due(self, done: int) -> bool:
        """Say whether a checkpoint is due."""
        seconds = time.perf_counter() - self.kept_at
        held = self.checkpoints
        return held is not None and held.due(done - max(self.kept_round, 0), seconds)

    def keep(self, state: Any, columns: dict[str, np.ndarray], done: int) -> None:
        """Write a checkpoint, if they are kept at all."""
        if self.checkpoints is None or done == self.kept_round:
            return
        folder = self.checkpoints.folder
        snapshot = Snapshot(self.runtime.fetch(state), columns, done, self.seconds())
        mesh.on_first(lambda: checkpoint.save(folder, snapshot, self.fingerprint))
        self.last_good = f"{folder}, after round {done}"
        self.kept_at, self.kept_round = time.perf_counter(), done

    def running(self) -> float:
        """Return the seconds of running so far, those before a resume included."""
        return self.seconds()["run"]

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far, those before a resume included."""
        compiling = self.runtime.compile_seconds
        waited = compiling - self.prepared
        running = max(time.perf_counter() - self.began - waited, 0.0)
        now = {"compile": compiling, "run": running}
        return {name: now[name] + self.earlier.get(name, 0.0) for name in now}

    def where_it_stands(self, done: int, rounds: int) -> str:
        """Say how far the run came when it was asked to stop."""
        if self.checkpoints is None:
            kept = "Nothing was kept, as no folder was given."
        else:
            home = self.checkpoints.part_of or self.checkpoints.folder
            kept = f"Kept in {self.last_good}. {how_to_continue(home)}".rstrip()
        return f"After round {done} of {rounds}. {kept}"
