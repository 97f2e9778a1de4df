"""Memory that an experiment takes on its device, and ways to take less."""

from typing import Any

import jax

from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.runtime import SimulatorRuntime
from fedbilevel.runtime.compilation import MemoryPlan
from fedbilevel.runtime.driver import first_span

PARTS = {
    "frozen": "the frozen model",
    "rows": "rows of all clients, and of tests",
    "state": "what is trained: x, the copies of y, and what methods keep of them",
    "working": "intermediate values of the clients that work at a time",
}


def planned_memory(experiment: Experiment) -> dict[str, Any]:
    """Compile the rounds of an experiment, and say what they take; none is run."""
    if experiment.runtime != SimulatorRuntime.name:
        raise InvalidInputError(
            f"--memory reports compiled rounds, and the runtime {experiment.runtime} "
            "compiles none. Leave out --runtime."
        )
    built = experiment.build()
    with built.naming_sites():
        runtime = experiment.runtime_of()(built.job(experiment.seed))
        span = first_span(
            runtime,
            built.rounds,
            experiment.measure_every,
            experiment.stopping(built.setting.headline),
        )
        plan = runtime.memory(span)
    at_once = runtime.layout.at_once or runtime.layout.places(runtime.job.participants)
    return {
        "task": experiment.label,
        "algorithm": built.entry.name,
        "device": jax.local_devices()[0].device_kind,
        "model_devices": experiment.model_devices,
        "clients": runtime.job.clients,
        "clients_at_once": at_once,
        "batch": runtime.job.lower_batch,
        **{name: getattr(plan, name) for name in (*PARTS, "total", "limit")},
        "fits": plan.fits,
        "advice": _advice(experiment, plan),
    }


def _more_devices(experiment: Experiment) -> list[str]:
    """Say that devices with a memory of their own can share the model."""
    apart = jax.local_device_count() if jax.default_backend() != "cpu" else 1
    more = [n for n in range(2, apart + 1) if apart % n == 0]
    fewest = [n for n in more if n > experiment.model_devices][:1]
    return [f"--model-devices {n}" for n in fewest]


def _advice(experiment: Experiment, plan: MemoryPlan) -> list[str]:
    """Say what makes the largest parts smaller, the largest first."""
    options = experiment.task_options
    given = {**options, **experiment.options}
    ways = {
        "frozen": [("precision", "bfloat16")],
        "working": [("rows_at_once", "1"), ("recomputed", "blocks")],
    }
    plain = {
        "frozen": _more_devices(experiment),
        "rows": ["fewer rows, or more devices: each holds those of its own clients"],
        "state": ["a method with fewer copies of y, or a smaller model"],
        "working": ["a smaller --batch"],
    }
    sizes = {name: getattr(plan, name) for name in PARTS}
    advice = []
    for part in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[part] < plan.total / 4:
            continue
        advice += [
            f"--set {name}={value}"
            for name, value in ways.get(part, [])
            if name in options and str(given[name]).lower() != value
        ]
        advice += plain.get(part, [])
    return advice
