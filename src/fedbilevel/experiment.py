"""A named task with a named algorithm: what the command line runs and resumes."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel import algorithms, tasks
from fedbilevel._files import write_atomically
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import CheckpointError, unknown_name
from fedbilevel.result import Result
from fedbilevel.run import open_folder, run_job
from fedbilevel.runtime import Job
from fedbilevel.runtime.driver import Checkpoints, Watch
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
        """Build task and algorithm, run, and return the result.

        `watch` is shown the task's headline metric only.
        """
        task, algorithm, sizes, values = self._build()
        job = Job.of(
            algorithm,
            task.problem,
            task.data,
            task.x,
            task.y,
            metrics=task.metrics,
            seed=self.seed,
            participants=self.participants,
            batch=sizes["batch"],
        )
        keeper = None
        if folder is not None:
            open_folder(folder, resume)
            every = (self.checkpoint_rounds, self.checkpoint_seconds)
            keeper = Checkpoints(folder, *every)
            self._save(folder)
        steps = sizes["local_steps"]
        result = run_job(
            job,
            sizes["rounds"],
            measure_every=self.measure_every,
            runtime=self.runtime,
            keeper=keeper,
            watch=_headline_only(watch, task.headline),
            task=self.task,
            config={"local_steps": steps, "seed": self.seed, "task": values},
        )
        shown = result.point if task.shows_point else {}
        final = {
            **result.final,
            **{name: leaf.tolist() for name, leaf in shown.items()},
        }
        result = dataclasses.replace(result, algorithm=self.algorithm, final=final)
        if folder is not None:
            result.save(folder)
        return result

    def _build(
        self,
    ) -> tuple[tasks.Task, AbstractAlgorithm, dict[str, int], dict[str, Any]]:
        make, kind = tasks.find(self.task), algorithms.find(self.algorithm)
        for_task, for_algorithm = self._split_options(
            option_defaults(make), kind.option_names()
        )
        values = tasks.read_options(make, for_task)
        task = make(**values) if self.clients is None else make(self.clients, **values)
        recommended = dict(task.recommended)
        sizes = {name: int(recommended.pop(name)) for name in _SIZES}
        chosen = {name: getattr(self, name) for name in _SIZES}
        sizes |= {name: value for name, value in chosen.items() if value is not None}
        algorithm = kind.from_options(
            {"warm_start": "0", **recommended, **for_algorithm},
            task.data.clients,
            sizes["local_steps"],
        )
        return task, algorithm, sizes, values

    @staticmethod
    def load(folder: Path) -> "Experiment":
        """Read the experiment of a run folder."""
        path = folder / _FILE
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no {_FILE}: no run of `fedbilevel run` began there."
            )
        try:
            return Experiment(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error

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


def _headline_only(watch: Watch | None, headline: str) -> Watch | None:
    if watch is None:
        return None

    def show(done: int, total: int, newest: dict[str, float]) -> None:
        watch(done, total, {n: v for n, v in newest.items() if n == headline})

    return show
