"""Ready problems with data, start, metrics and settings, one module each."""

import sys

from fedbilevel import _registry
from fedbilevel.tasks._base import Task as Task
from fedbilevel.tasks._base import read_options as read_options


def names() -> list[str]:
    """List the tasks, as the command line spells them."""
    return _registry.names(sys.modules[__name__])


def find(name: str):
    """Return the function `make(clients, **options) -> Task` of a task by its name."""
    return _registry.entry(sys.modules[__name__], name, "task").make
