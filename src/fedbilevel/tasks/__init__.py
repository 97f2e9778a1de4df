"""Ready problems with data, start, metrics and settings, one module each."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from fedbilevel._registry import TASKS
from fedbilevel._registry import identity as identity
from fedbilevel._registry import is_file as is_file
from fedbilevel._registry import label as label
from fedbilevel.errors import InvalidInputError
from fedbilevel.tasks._base import Averaged as Averaged
from fedbilevel.tasks._base import Task as Task
from fedbilevel.tasks._base import built as built
from fedbilevel.tasks._base import read_options as read_options

names, installed, as_name = TASKS.names, TASKS.installed, TASKS.name_of


def find(name: str) -> Callable[..., Any]:
    """Return the function `make(clients, **options) -> Task` of a task by its name.

    `path/to/file.py:make` is that of a file; it is run.
    """
    found = TASKS.entry(name)
    make = found.make if isinstance(found, ModuleType) else found
    if not callable(make) or isinstance(make, Task):
        raise InvalidInputError(
            f"task '{label(name)}' is no function. A task is a function "
            "`make(clients, *, option=default, ...)` that returns a `fedbilevel.Task`."
        )
    return make
