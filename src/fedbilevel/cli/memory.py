"""What `plan --memory` prints: the parts of a run's memory, and what takes less."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbilevel.cli.output import print_json, write_json
from fedbilevel.cli.progress import status

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

__all__ = ["lines", "show_memory"]


def show_memory(experiment: "Experiment", out: Path | None, as_json: bool) -> None:
    """Plan the memory of an experiment, and print it; write it to a file, too."""
    from fedbilevel.experiments.memory import planned_memory
    from fedbilevel.runtime import configure

    configure(experiment.precision)
    with status("compiling"):
        summary = planned_memory(experiment)
    if out is not None:
        write_json(out, summary)
    if as_json:
        print_json(summary)
        return
    console = Console()
    for line in lines(summary):
        console.print(line, markup=False, highlight=False)


def lines(summary: dict[str, Any]) -> list[str]:
    """Say what is large, whether it fits, and what takes less."""
    from fedbilevel.experiments.memory import PARTS

    devices = summary["model_devices"]
    shared = f", one of {devices} that share the model" if devices > 1 else ""
    told = [
        f"{summary['algorithm']} on {summary['task']}, {summary['clients']} clients, "
        f"{summary['clients_at_once']} at a time, on {summary['device']}{shared}:"
    ]
    told += [f"{_size(summary[name]):>10}  {text}" for name, text in PARTS.items()]
    told.append(f"{_size(summary['total']):>10}  in all, with small inputs and outputs")
    limit = summary["limit"]
    if limit is None:
        told.append("The device does not say how much it has.")
    else:
        ending = "it fits" if summary["fits"] else "it does not fit"
        told.append(f"{_size(limit):>10}  on the device: {ending}.")
    if summary["advice"]:
        told.append(f"Less: {'; '.join(summary['advice'])}.")
    return told


def _size(count: int) -> str:
    """Return a number of bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
