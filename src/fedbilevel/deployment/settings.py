"""What server and sites must be started with alike."""

from dataclasses import asdict
from typing import Any

from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.runtime.federation import settings_mark

__all__ = ["clients_of", "mark_of", "shared_settings"]

# How long to run, where rows lie, and what is kept are each side's own business.
_OWN = ("rounds", "runtime", "measure_every", "checkpoint_rounds", "checkpoint_seconds")


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that both sides compare."""
    settings = {n: v for n, v in asdict(experiment).items() if n not in _OWN}
    options = dict(experiment.options)
    options.pop("data", None)
    return {**settings, "options": options}


def mark_of(experiment: Experiment) -> str:
    """Return the fingerprint of the shared settings."""
    return settings_mark(shared_settings(experiment))


def clients_of(experiment: Experiment) -> int:
    """Return the number of sites, which must be given."""
    if experiment.clients is None:
        raise InvalidInputError("give --clients, the number of sites.")
    return experiment.clients
