"""A named task with a named algorithm: what the command line runs and resumes."""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from fedbilevel import algorithms, runtime, tasks
from fedbilevel._files import naming_damage, write_atomically
from fedbilevel._folders import EXPERIMENT, how_to_continue
from fedbilevel._schema import Settings, checked
from fedbilevel._table_choices import FLAGS
from fedbilevel.algorithms import AbstractAlgorithm, Entry, quantile_clipped, steadied
from fedbilevel.channels import Channel
from fedbilevel.datasets import Dataset
from fedbilevel.errors import CheckpointError, InvalidInputError, unknown_name
from fedbilevel.experiments import clients
from fedbilevel.experiments.built import Built, headline_only
from fedbilevel.experiments.options import algorithm_from, options_of
from fedbilevel.result import Result
from fedbilevel.runtime import mesh
from fedbilevel.runtime.layout import check_model_devices
from fedbilevel.studies.seeds import run_seeds
from fedbilevel.studies.setting import Keeping, Setting
from fedbilevel.studies.single import run_job
from fedbilevel.studies.validation import HELD_OUT
from fedbilevel.tasks._base import option_defaults

_SIZES = ("rounds", "local_steps", "batch")
_RUNTIMES: dict[str, Callable[[runtime.Job], Any]] = {
    one.name: one for one in (runtime.SimulatorRuntime, runtime.ReferenceRuntime)
}


@dataclass(frozen=True)
class Experiment(Settings):
    """Names and numbers that fix a run. None leaves a choice to the task.

    `Settings` declares the fields. `options` are parameters of the task or the
    algorithm, as text. `clip`, `noise`, `compress`, `compress_down` and `aggregate` are
    read by `read_channel`; `delta` goes with the noise. A `clip` of `quantile` is a
    part of the algorithm, in `QuantileClip`. `task` and `algorithm` may be given as a
    function and a class, too: they are kept by the file that they are in.
    """

    typed: ClassVar[Collection[str]] = FLAGS

    def __post_init__(self) -> None:
        own = self.algorithm
        read = {
            "weights": clients.read_weights(self.weights),
            # From a file or a message they come as a list.
            "wrappers": tuple(self.wrappers),
            "clip": clients.as_clip(self.clip),
            "participation": clients.read_participation(self.participation),
            "task": tasks.as_name(self.task),
            "algorithm": None if own is None else algorithms.as_name(own),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        """The task's name for people."""
        return tasks.label(self.task)

    @cached_property
    def task_options(self) -> dict[str, Any]:
        """The options that the task takes, with their defaults."""
        return option_defaults(tasks.find(self.task))

    @property
    def method_options(self) -> dict[str, str]:
        """The options that are the algorithm's, and not the task's."""
        return {n: v for n, v in self.options.items() if n not in self.task_options}

    @property
    def sites(self) -> int:
        """The number of sites of a federation, which must be given."""
        if self.clients is None:
            raise InvalidInputError("give --clients, the number of sites.")
        return self.clients

    def require_tunable(self) -> None:
        """Raise where trials at sites would spend privacy."""
        if self.noise:
            raise InvalidInputError(
                "--tune with --noise: every trial would spend privacy, and none could "
                "be judged, since nothing is measured under noise. Tune on rows that "
                "may be seen, by `fedbilevel tune`, and give the steps by --set."
            )

    def run(
        self,
        folder: Path | str | None = None,
        *,
        resume: bool = False,
        watch: runtime.Watch | None = None,
        on_round: runtime.OnRound | None = None,
        built: Callable[[tasks.Task], None] | None = None,
        about: Callable[..., None] = lambda word, who="": None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Result:
        """Build task and algorithm, run, and return the result.

        `watch` is shown the task's headline metric only, `on_round` gets every
        measured round. `built` is called with the task before anything is computed.
        `about(word, who)` gets the steps before the first round, and the clients of
        every exchange; `say` what noise will leave of what they find.
        """
        made = mesh.on_all(self.build)
        if built is not None:
            built(made.task)
        about("checking")
        job = mesh.on_all(lambda: made.job(self.seed))
        some = f"{job.participants} of " if job.participants < job.clients else ""
        about("checking", f"{some}{job.clients} clients")
        clients.require_signal(self, job, made.rounds, say)
        checkpoints = None
        if folder is not None:
            every = (self.checkpoint_rounds, self.checkpoint_seconds)
            checkpoints = Keeping(folder, resume, *every).opened()
            mesh.on_first(lambda: self.save(Path(folder)))
        with made.naming_sites(), runtime.reporting(about):
            result = run_job(
                job,
                made.rounds,
                measure_every=self.measure_every,
                stopping=self.stopping(made.setting.headline),
                runtime=self.runtime_of(),
                checkpoints=checkpoints,
                watch=headline_only(watch, made.setting.headline),
                on_round=on_round,
                task=self.label,
                config={**made.config, "seed": self.seed},
            )
        result = made.judged(made.named(result))
        if folder is not None:
            mesh.on_first(lambda: made.save(result, Path(folder)))
        return result

    def run_seeds(self, count: int) -> list[Result]:
        """Run from `count` random seeds, the experiment's own first, as one program."""
        built = self.build()
        with built.naming_sites():
            results = run_seeds(
                built.job(self.seed),
                built.rounds,
                range(self.seed, self.seed + count),
                measure_every=self.measure_every or 1,
                stopping=self.stopping(built.setting.headline),
                task=self.label,
                config=built.config,
            )
        return [built.named(result) for result in results]

    def build(self) -> Built:
        """Build what the names stand for, once."""
        self.check()
        task, values, _ = self.build_task()
        return self.bind(task, values)

    def check(self) -> None:
        """Raise for what is wrong, before any data are loaded."""
        self.channel()
        tasks.find(self.task)
        self._check_options()
        self.runtime_of()
        if self.model_devices != 1:
            check_model_devices(self.model_devices)

    def bind(self, task: tasks.Task, values: Mapping[str, Any]) -> Built:
        """Return what the names stand for, with a task that was built."""
        entry = algorithms.find(self.algorithm_for(task))
        algorithm = self.algorithm_by(entry, task.recommended, task.data.clients)
        sizes = self.sizes(task.recommended)
        chosen = {"local_steps": sizes["local_steps"], **self.channel_settings()}
        config = {**chosen, "task": values, "headline": task.headline}
        if task.origin is not None:
            config["data"] = task.origin.summary
        setting = self.setting(task, entry, self.channel())
        return Built(task, entry, algorithm, setting, sizes["rounds"], config)

    def _check_options(self) -> None:
        """Raise if an option is unknown; its owner may need a built task.

        Data may take long to load, and a typing error should show before.
        """
        known = self.task_options
        if self.algorithm is None and self.options.keys() <= known.keys():
            return  # every method would have to be imported to be asked for its own
        chosen = algorithms.names() if self.algorithm is None else [self.algorithm]
        for name in chosen:
            known = {**known, **options_of(algorithms.find(name))}
        for option in self.options:
            if option not in known:
                raise unknown_name("option", option, known)

    def setting(self, task: tasks.Task, entry: Entry, channel: Channel) -> Setting:
        """Return everything of the run but the algorithm."""
        sampling = runtime.Sampling(self.sizes(task.recommended)["batch"])
        if not entry.pools:
            sampling = clients.drawn(self, task, sampling)
        problem = task.problem
        if self.model_devices > 1:
            problem = replace(problem, model_devices=self.model_devices)
        return Setting(
            problem,
            task.data.pooled() if entry.pools else task.data,
            (task.x, task.y),
            task.metrics,
            task.headline,
            sampling,
            channel,
            task.tuned_by or HELD_OUT,
        )

    def stopping(self, headline: str) -> runtime.Stopping:
        """Return what ends a run before its last round."""
        budgets = (self.max_bytes, self.max_samples, self.max_seconds)
        return runtime.Stopping(headline, self.target, self.patience, *budgets)

    def channel(self) -> Channel:
        """Return what replies go through."""
        return clients.channel_of(self)

    def channel_settings(self) -> dict[str, Any]:
        """Return what of the channel is not as if it was left out."""
        values = {name: getattr(self, name) for name in clients.CHANNEL}
        chosen = {n: v for n, v in values.items() if v != getattr(Settings, n)}
        return {**chosen, "delta": self.delta} if self.noise else chosen

    def runtime_of(self) -> Callable[[runtime.Job], Any]:
        """Return what makes the runtime of a job."""
        if self.runtime not in _RUNTIMES:
            raise unknown_name("runtime", self.runtime, _RUNTIMES)
        if self.model_devices != 1 and self.runtime != runtime.SimulatorRuntime.name:
            raise InvalidInputError(
                f"the runtime {self.runtime} has the whole model on one device. Leave "
                "out --model-devices, or --runtime."
            )
        if self.client_states is None:
            return _RUNTIMES[self.runtime]
        if self.runtime != runtime.DiskSimulatorRuntime.name:
            raise InvalidInputError(
                f"the runtime {self.runtime} keeps the states of clients in memory. "
                "Leave out --client-states, or --runtime."
            )
        return partial(runtime.DiskSimulatorRuntime, folder=self.client_states)

    def algorithm_for(self, task: tasks.Task) -> str:
        """Return the algorithm that was chosen, or the task's own."""
        return self.algorithm or task.algorithm

    def build_task(
        self, data: Dataset | None = None
    ) -> tuple[tasks.Task, dict[str, Any], dict[str, str]]:
        """Build the task; return it with its options, and those that are not its.

        `data` is a set in memory in place of the one that the option names.
        """
        make = tasks.find(self.task)
        rest = self.method_options
        own = {n: v for n, v in self.options.items() if n not in rest}
        values = tasks.read_options(make, own)
        given = values if data is None else {**values, "data": data}
        # Arrays that devices are to share may be more than one of them holds.
        on_host = mesh.made_on_host if self.model_devices > 1 else nullcontext
        with on_host():
            task = tasks.built(make, self.label, self.clients, given)
        if data is not None:
            values["data"] = data.name
        return clients.weighed(self, task), values, rest

    def sizes(self, recommended: Mapping[str, str]) -> dict[str, int]:
        """Return rounds, local steps and batch: chosen, or else recommended."""
        found = {}
        for name in _SIZES:
            value = getattr(self, name)
            if value is None and name not in recommended:
                raise InvalidInputError(
                    f"task '{self.label}' recommends no {name}. Give "
                    f"--{name.replace('_', '-')}, or let the task recommend it: "
                    f"`Task(recommended={{'{name}': ...}})`."
                )
            found[name] = int(recommended[name]) if value is None else value
        return found

    def algorithm_by(
        self, entry: Entry, recommended: Mapping[str, str], count: int
    ) -> AbstractAlgorithm:
        """Build what a task recommends and what was chosen, for so many clients."""
        options, known = self.method_options, options_of(entry)
        for option in options:
            if option not in known:
                raise unknown_name("option", option, [*self.task_options, *known])
        steps = self.sizes(recommended)["local_steps"]
        cohort = str(self.participants or count)
        usual = self.steps_of(recommended, entry.name)
        settings = {"participants": cohort, **usual, **options}
        for size in _SIZES:
            settings.pop(size, None)
        built = algorithm_from(entry, settings, count, steps)
        for text in self.wrappers:
            built = algorithms.read_wrapper(text)(built)
        quantile = clients.read_quantile(self.clip)
        if quantile is not None:
            built = quantile_clipped(built, quantile)
        return steadied(built, self._measures)

    @property
    def _measures(self) -> bool:
        """Say whether a run is guarded; clip and noise hide what it would look at.

        A bound that follows the changes hides nothing.
        """
        hidden = self.clip is not None and clients.read_quantile(self.clip) is None
        return self.safeguard and not hidden and not self.noise

    def steps_of(self, recommended: Mapping[str, str], name: str) -> dict[str, str]:
        """Return what a task recommends: numbers, where a run measures nothing."""
        usual = {n: v for n, v in recommended.items() if n.partition(":")[0] != "auto"}
        if not self._measures:
            return usual
        measured = recommended.get("auto", "").split()
        own = recommended.get(f"auto:{name}", "").split()
        shares = dict(pair.split("=", 1) for pair in own)
        return usual | dict.fromkeys(measured, "auto") | shares

    @staticmethod
    def load(folder: Path | str) -> "Experiment":
        """Read the experiment of a run folder."""
        folder = Path(folder)
        path = folder / EXPERIMENT
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no {EXPERIMENT}: no run of `fedbilevel run` began "
                f"there. {how_to_continue(folder)}".rstrip()
            )
        with naming_damage(path):
            return checked(Experiment, json.loads(path.read_text()))

    def save(self, folder: Path) -> None:
        """Write the experiment into a run folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_atomically(folder / EXPERIMENT, text)
