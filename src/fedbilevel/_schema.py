"""Every option of experiments, searches, servers and sites, declared once.

A field has the option's name, type and default; its metadata have the rest (`Option`):
the meaning, its bounds, and which sides must agree on it. The command line, the JSON of
run folders, the settings that server and sites compare, and the reference in the docs
are read from these fields. Options of tasks and methods are declared by those.

Plain dataclasses hold the schema. Help must be shown in .3 seconds, without JAX. On top
of typer (.095 processor seconds) pydantic 2 takes another .085 to import; tyro takes
.053, and has no panels and no groups that several commands share. msgspec takes .007
and would check JSON, but makes no command line: it would replace `checked` below alone.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import partial
from types import UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

from fedbilevel.errors import InvalidInputError

# Sides that must agree on an option.
SITES = "the server and all sites"
FOLDER = "runs that share a folder"
NOBODY = "nobody"
WEIGHTS = ("rows", "equal", "task")  # what clients count, in words
_ENDING = "When the run ends before its last round"
_CHANNEL = "Compression, privacy and robustness"
_SEARCH = "Tuning of steps and weights"
_WAITING = "Waiting for nodes"
_ALLOWED = "Limits of this site"
Kind = TypeVar("Kind")


class Option(NamedTuple):
    """Metadata of an option besides its name, type and default.

    `typed` is its type on the command line where that is another one, `flag` its name
    there, and `spelled` what is typed for a name that Python cannot have; nothing for
    what its place names. `least` is the smallest value, `above` one to exceed.
    """

    meaning: str
    agree: str = NOBODY
    panel: str | None = None
    typed: Any = None
    flag: str | None = None
    spelled: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    above: float | None = None


def option(default: Any, meaning: str, **more: Any) -> Any:
    """Declare an option as a field of a dataclass; `more` are fields of `Option`."""
    return field(default=default, metadata=Option(meaning, **more)._asdict())


def options_of(kind: type) -> Iterator[tuple[Field, Option]]:
    """Return the fields of a dataclass that are options, and what is known of them."""
    return ((one, Option(**one.metadata)) for one in fields(kind) if one.metadata)


def check_bounds(kind: type, given: Mapping[str, Any]) -> None:
    """Raise if a value that was typed is out of its bounds; None stays a choice."""
    for one, known in options_of(kind):
        flag = known.flag or one.name
        value = given.get(flag)
        if not isinstance(value, int | float):
            continue
        shown = f"--{flag.replace('_', '-')} {value:g}"
        if known.least is not None and value < known.least:
            raise InvalidInputError(f"{shown}: must be at least {known.least}.")
        if known.above is not None and not value > known.above:
            raise InvalidInputError(f"{shown}: must be above {known.above:g}.")


def checked(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Build a dataclass from JSON; raise TypeError if a value is of a wrong type."""
    types = {one.name: one.type for one in fields(kind)}  # type: ignore[arg-type]
    for name, value in dict(values).items():
        if name in types and not _fits(value, types[name]):
            raise TypeError(f"{name} cannot be {value!r:.80}")
    return kind(**values)


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        own = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_fits(v, own) for v in value)
    if get_origin(kind) is not None:  # a mapping of texts
        return isinstance(value, Mapping)
    if kind in (int, float):
        number = isinstance(value, int | float) and type(value) is not bool
        # A whole number of JSON may have any number of digits, and then is no float.
        right = number and (isinstance(value, float) or abs(value) < 2**1000)
        return right and (kind is float or value == value // 1)
    return isinstance(value, kind)


def command_line(command: str, words: Sequence[str]) -> str:
    """Return a command of fedbilevel as it is typed."""
    return shlex.join(["fedbilevel", command, *words])


_agreed = partial(option, agree=SITES)
_ends = partial(option, None, panel=_ENDING)
_sent = partial(option, agree=SITES, panel=_CHANNEL)
_tried = partial(option, agree=FOLDER, panel=_SEARCH)
_waits = partial(option, panel=_WAITING)
_allows = partial(option, panel=_ALLOWED)


@dataclass(frozen=True)
class Settings:
    """Names and numbers that fix a run. None leaves a choice to the task."""

    task: Any = _agreed(
        MISSING,
        "see `fedbilevel list tasks`, or path/to/file.py:make",
        typed=str,
        spelled="",
    )
    algorithm: Any = _agreed(
        None,
        "see `fedbilevel list algorithms`, or path/to/file.py:Name; the task's own if "
        "left out",
        typed=str | None,
    )
    clients: int | None = _agreed(None, "number of clients, K", least=1)
    participants: int | None = _agreed(
        None, "clients drawn per exchange; all if left out"
    )
    rounds: int | None = option(None, "communication rounds", least=1)
    local_steps: int | None = _agreed(
        None, "local steps between two rounds, p", least=1
    )
    batch: int | None = _agreed(None, "rows per sample", least=1)
    seed: int = _agreed(0, "random seed of samples and cohorts")
    runtime: str = option(
        "simulator",
        "simulator or reference",
        agree=FOLDER,
        choices=("simulator", "reference"),
    )
    model_devices: int = option(
        1,
        "devices that share one copy of the model that the task has frozen",
        agree=FOLDER,
        least=1,
    )
    client_states: str | None = option(
        None,
        "folder for client states between rounds, for low participation rates: less "
        "memory, more time",
    )
    dropout: float = option(
        0.0,
        "chance that a client that is asked does not reply, in each exchange",
        agree=FOLDER,
        least=0,
    )
    participation: Any = option(
        None,
        "CSV or JSON file with the chance of each site to reply when it is asked, in "
        "their order or by name; or P0,P1,... or NAME=P,...",
        agree=FOLDER,
        typed=str | None,
    )
    precision: str = _agreed(
        "float32", "float32 or float64", choices=("float32", "float64")
    )
    measure_every: int | None = option(
        None,
        "rounds between two measurements; a run measures 8 rounds, then four times "
        "while their number doubles, or for a tenth of its time where one takes longer "
        "than a round; the others every round",
        agree=FOLDER,
        least=1,
    )
    checkpoint_rounds: int | None = option(None, "rounds between two checkpoints")
    checkpoint_seconds: float | None = option(30.0, "seconds between two checkpoints")
    target: float | None = _ends(
        "value of the task's main metric at or below which the run ends"
    )
    patience: int | None = _ends(
        "stop after this many measurements without improvement", least=1
    )
    max_bytes: int | None = _ends(
        "bytes that all clients together may send and receive", least=1
    )
    max_samples: int | None = _ends("rows that all clients together may draw", least=1)
    max_seconds: float | None = _ends(
        "seconds that it may run, without those of compiling", above=0
    )
    clip: float | str | None = _sent(
        None,
        "norm that every block of a client's change is cut down to; `quantile` or "
        "quantile:SHARE follows the norms, in local steps, too",
        typed=str | None,
    )
    noise: float = _sent(
        0.0, "noise multiplier of a block: deviation of the sum / clip"
    )
    delta: float = _sent(1e-5, "delta at which epsilon is reported")
    compress: str | None = _sent(
        None, "topk:FRACTION, quantize:BITS or bfloat16, of what goes up"
    )
    compress_down: str | None = _sent(None, "bfloat16, of what goes down")
    aggregate: str = _sent(
        "mean",
        "mean, secure, median, trimmed-mean:FRACTION, geometric-median or krum:FAULTY",
    )
    wrappers: tuple[str, ...] = _agreed(
        (),
        "a wrapper around the method, see `fedbilevel list wrappers`; may be repeated, "
        "the innermost first",
        typed=list[str] | None,
        spelled="--with",
        metavar="NAME[=VALUE]",
    )
    safeguard: bool = _agreed(
        True,
        "measure the steps that the task leaves to the run; roll back a diverging run "
        "and continue with smaller steps",
    )
    weights: tuple[float, ...] | str | None = _agreed(
        None,
        "what the clients count in means: rows, equal, or W0,W1,...; if left out, by "
        "their rows where these are of a data set, else as the task says (task)",
        typed=str | None,
        choices=WEIGHTS,
    )
    force: bool = option(
        False, "run even where noise hides whatever the sites find", panel=_CHANNEL
    )
    options: Mapping[str, str] = field(default_factory=dict)
    typed: ClassVar[Collection[str]] = ()  # names in `options` with flags of their own

    def differences(self, other: "Settings") -> list[str]:
        """Say in which options another run may not differ that shares the folder."""
        apart = []
        for one, known in options_of(type(self)):
            here, there = getattr(other, one.name), getattr(self, one.name)
            if known.agree != NOBODY and here != there:
                apart.append((one.name, there, here))
        for name in sorted({*self.options, *other.options}):
            held = [one.options.get(name, "left out") for one in (self, other)]
            if self.options.get(name) != other.options.get(name):
                apart.append((name, *held))
        return [
            f"{name} is {there} there and {here} here" for name, there, here in apart
        ]

    def shared(self) -> dict[str, Any]:
        """Return the options on which the server and all sites must agree."""
        known = options_of(type(self))
        own = {one.name for one, about in known if about.agree != SITES}
        return {n: value for n, value in asdict(self).items() if n not in own}

    def chosen(self) -> dict[str, Any]:
        """Return the options that are not None, for the record of a run."""
        return {n: value for n, value in asdict(self).items() if value is not None}

    def arguments(
        self,
        *,
        shared: bool = False,
        flags: Mapping[str, str] | None = None,
        without: Collection[str] = (),
    ) -> list[str]:
        """Return the arguments of a command that has these settings, as they are typed.

        What has its default is left out, and with `shared` what sites need not agree
        on, too. `flags` are options that the command has under other names; `without`
        are names in `options` that are left out.
        """
        words = [self.task]
        for one, known in list(options_of(type(self)))[1:]:
            value = getattr(self, one.name)
            if value == one.default or (shared and known.agree != SITES):
                continue
            flag = (flags or {}).get(one.name, one.name).replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
                continue
            if known.spelled is not None:
                words += [word for text in value for word in (known.spelled, text)]
                continue
            text = ",".join(map(repr, value)) if isinstance(value, tuple) else value
            words += [f"--{flag}", str(text)]
        for name, value in self.options.items():
            flag = [f"--{name.replace('_', '-')}", value]
            if name not in without:
                words += flag if name in self.typed else ["--set", f"{name}={value}"]
        return words


@dataclass(frozen=True)
class Tuning:
    """How much is tried: points, in how many rungs, from how many seeds, chosen how."""

    trials: int = _tried(20, "points to try; lists of values are all tried", least=1)
    rungs: int = _tried(
        1,
        "1 runs all trials to the end; with more, the best third after each rung "
        "continues three times as long",
        least=1,
    )
    seeds: int = _tried(
        2,
        "random seeds of every trial, others than the result's",
        flag="tuning_seeds",
        least=1,
    )
    sampler: str = _tried(
        "fitted",
        "fitted: later points follow from earlier ones; even; or optuna, if it is "
        "installed",
    )

    def __post_init__(self) -> None:
        for name in ("trials", "rungs", "seeds"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name}={getattr(self, name)} of tuning: at least 1."
                )

    def arguments(self) -> list[str]:
        """Return the arguments that are not as if they were left out."""
        words = []
        for one, known in options_of(Tuning):
            if getattr(self, one.name) != one.default:
                flag = (known.flag or one.name).replace("_", "-")
                words += [f"--{flag}", str(getattr(self, one.name))]
        return words


@dataclass(frozen=True)
class Terms:
    """How long a server waits, and what it takes.

    `keys` are the fingerprints of the keys of clients 0, 1, ...: a node with another
    one is not taken for that client.
    """

    deadline: float = _waits(60.0, "seconds an exchange may take", above=0)
    minimum: int = _waits(1, "replies without which an exchange is made again", least=1)
    patience: float = _waits(
        600.0, "seconds to wait for all nodes at the start", above=0
    )
    tolerance: float = _waits(
        1e3, "a reply that moves so many times the median is left out", above=0
    )
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits set by the operator of a site: see `federation.ledger.SiteLimits`."""

    measure: str | None = _allows(
        None,
        "none, or scalars: losses and metrics; left out: scalars, or none where "
        "replies are masked or noisy",
    )
    max_exchanges: int | None = _allows(
        None, "replies that are given, and measurements"
    )
    max_epsilon: float | None = _allows(None, "privacy that is spent, at --delta")
    largest_point: float = _allows(1e8, "size of a number in what is sent to the site")
    cohorts: str | None = _allows(
        None,
        "any, or apart: masked sums over one set of sites, in all federations; left "
        "out: apart where replies are of all rows",
    )
    minimum_batch: int = _allows(1, "rows of a sample below which not to start")
    minimum_rows: int = _allows(1, "rows of a level below which not to start")
