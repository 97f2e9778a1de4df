"""A named task with a named algorithm: what the command line runs and resumes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedbilevel import algorithms, tasks
from fedbilevel._files import write_atomically
from fedbilevel.errors import CheckpointError, InvalidInputError, unknown_name
from fedbilevel.result import Result
from fedbilevel.run import open_folder, run
from fedbilevel.runtime.driver import Watch
from fedbilevel.tasks._base import option_defaults

__all__ = ["Experiment"]

_FILE = "experiment.json"
_SIZES = ("rounds", "local_steps", "batch")


@dataclass(frozen=True)
class Experiment:
    """Names and numbers that fix a run. None leaves a choice to the task.

    `options` are parameters of the task or the algorithm, as text.
    """

    task: str
    algorithm: str = "local-bsgvrm"
    clients: int | None = None
    participants: int | None = None
    rounds: int | None = None
    local_steps: int | None = None
    batch: int | None = None
    seed: int = 0
    runtime: str = "simulator"
    precision: str = "float32"
    measure_every: int = 1
    checkpoint_rounds: int | None = None
    checkpoint_seconds: float = 30.0
    options: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        folder: Path | None = None,
        *,
        resume: bool = False,
        watch: Watch | None = None,
    ) -> Result:
        """Build task and algorithm, run, and return the result."""
        make, kind = tasks.find(self.task), algorithms.find(self.algorithm)
        for_task, for_algorithm = self._split_options(
            option_defaults(make), kind.option_names()
        )
        values = tasks.read_options(make, for_task)
        task = make(**values) if self.clients is None else make(self.clients, **values)
        clients, recommended = task.data.clients, dict(task.recommended)
        for name in _SIZES:
            chosen = getattr(self, name)
            recommended[name] = recommended[name] if chosen is None else str(chosen)
        rounds, local_steps, batch = (int(recommended.pop(name)) for name in _SIZES)
        _check_local_steps(local_steps)
        algorithm = kind.from_options(
            {"warm_start": "0", **recommended, **for_algorithm}, clients, local_steps
        )
        headline = task.headline

        def show(done: int, total: int, newest: dict[str, float]) -> None:
            if watch is not None:
                shown = {headline: newest[headline]} if headline in newest else {}
                watch(done, total, shown)

        if folder is not None and not resume:
            open_folder(folder, resume=False)
            self._save(folder)
        result = run(
            task.problem,
            task.data,
            (task.x, task.y),
            algorithm,
            rounds=rounds,
            batch=batch,
            participants=self.participants,
            seed=self.seed,
            metrics=task.metrics,
            measure_every=self.measure_every,
            runtime=self.runtime,
            folder=folder,
            resume=folder is not None,
            checkpoint_rounds=self.checkpoint_rounds,
            checkpoint_seconds=self.checkpoint_seconds,
            watch=show,
            task=self.task,
            config={"local_steps": local_steps, "task": values},
        )
        result = Result(**{**vars(result), "algorithm": self.algorithm})
        if task.shows_point:
            shown = {name: leaf.tolist() for name, leaf in result.point.items()}
            result = Result(**{**vars(result), "final": {**result.final, **shown}})
        if folder is not None:
            result.save(folder)
        return result

    @staticmethod
    def load(folder: Path) -> "Experiment":
        """Read the experiment of a run folder."""
        path = folder / _FILE
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no {_FILE}: no run of `fedbilevel run` began there."
            )
        return Experiment(**json.loads(path.read_text()))

    def _save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_atomically(folder / _FILE, lambda file: file.write(text.encode()))

    def _split_options(self, task_options, algorithm_options):
        known = [*task_options, *algorithm_options]
        for name in self.options:
            if name not in known:
                raise unknown_name("option", name, known)
        for_task = {n: v for n, v in self.options.items() if n in task_options}
        rest = {n: v for n, v in self.options.items() if n not in task_options}
        return for_task, rest


def _check_local_steps(local_steps: int) -> None:
    if local_steps < 1:
        raise InvalidInputError(
            f"local_steps={local_steps}: make at least one a round."
        )
