"""Algorithms from options as the command line writes them, and back.

An algorithm's fields are its options: their names are the symbols of its paper, their
types say how a text is read. Steps and weights may also be given as effective values,
which mean the same for every algorithm and which tasks recommend; one table says which
parameter each of them sets.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, NamedTuple

from fedbilevel import schedules
from fedbilevel.algorithms import AbstractAlgorithm, Entry, Preset
from fedbilevel.algorithms.local._bases import Founding
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.hypergradient import (
    DARTS,
    SAMA,
    AbstractHypergradient,
    ForwardGradient,
    Neumann,
    RandomNeumann,
    Unrolled,
)
from fedbilevel.units import AbstractRelative, OfCurvature, OfDistance, read_relative

# The values of `auto`. A series may converge twice as fast; a step leaves a margin for
# differences of batches and clients. Made when used: a module that computes at import
# would fix the devices.
AUTO: Mapping[str, Callable[[], AbstractRelative]] = {
    "theta": lambda: OfCurvature(0.5),
    "upper_step": lambda: OfDistance(1.0),
    "lower_step": lambda: OfCurvature(0.25),
    "auxiliary_step": lambda: OfCurvature(0.25),
}
# Meanings of effective values, and of the parts of a series, for every algorithm.
MEANINGS = {
    "upper_step": "how far x moves along its direction at t = 0",
    "lower_step": "how far y moves along its direction at t = 0",
    "auxiliary_step": "how far z moves along its direction at t = 0; as y if left out",
    "upper_weight": "what x's direction forgets of itself in a step at t = 0",
    "lower_weight": "what y's direction forgets of itself in a step at t = 0",
    "auxiliary_weight": "what z's direction forgets in a step; as y's if left out",
    **{one.name: one.metadata["meaning"] for one in fields(Neumann)},
}
# Hypergradient estimators besides a method's own series, each with the options that set
# its first fields. They take those of a series: theta is a lower step, or what stands
# for the inverse Hessian, and q a number of lower steps.
SERIES, _OF_SERIES = "series", ("q", "theta")
HYPERGRADIENTS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "darts": (DARTS, ("theta",)),
    "forward-gradient": (ForwardGradient, (*_OF_SERIES, "directions")),
    "sama": (SAMA, ("theta",)),
    "unrolled": (Unrolled, _OF_SERIES),
}
# Choices that have words of their own.
_WORDS = {
    "alternating": ("order", {"simultaneous": False, "alternating": True}),
    "random_length": ("length", {"random": True, "full": False}),
}
_SCHEDULE = "1"  # a shape that changes nothing
# Effective values of parameters with common names; others declare their own
# (`fedbilevel.schedules.step`). Of steps with a common shape over t, it is a.
_USUAL = {
    "lr": schedules.Effective(("lower_step",)),
    "lr_x": schedules.Effective(("upper_step",), over="a"),
    "lr_y": schedules.Effective(("lower_step",), over="a"),
    "lr_z": schedules.Effective(("auxiliary_step", "lr_y", "lower_step"), over="a"),
    "theta": schedules.Effective(("theta",)),
    "terms": schedules.Effective(("q",)),
    "chains": schedules.Effective(("participants",)),
}


class Option(NamedTuple):
    """An option of an algorithm, for people."""

    name: str
    kind: str
    default: str
    meaning: str


def options_of(entry: Entry) -> dict[str, Option]:
    """Return every option that an algorithm takes."""
    known: dict[str, Option] = {}
    for letter, one in _fields(entry).items():
        meaning = one.metadata.get("meaning", "")
        sets = _effective_of(one)
        if one.type is AbstractHypergradient:
            known |= {name: _RECOMMENDED[name] for name in _OF_SERIES}
            known |= {one.name: one for one in (_HYPERGRADIENT, _DIRECTIONS)}
            if entry.rule is RandomNeumann:
                known["length"] = _LENGTH
            continue
        default = "from " + " or ".join(sets.names) if sets else _default(one, entry)
        known[letter] = Option(letter, _kind(one), default, meaning)
        if one.name in _WORDS:
            word, values = _WORDS[one.name]
            chosen = next(n for n, flag in values.items() if flag == one.default)
            kind = " or ".join(values)
            known[word] = Option(word, kind, chosen, f"sets {letter}: {meaning}")
        names = sets.names if sets else ()
        known |= {name: _RECOMMENDED[name] for name in names if name in MEANINGS}
    return known


_LENGTH = Option(
    "length",
    "random or full",
    "random",
    "one random term of the series, times their number, or the sum of all",
)
_HYPERGRADIENT = Option(
    "hypergradient",
    " or ".join((SERIES, *HYPERGRADIENTS)),
    SERIES,
    "the method's series, or an estimator in its place: q are its lower steps, and "
    "theta their size, or the stand-in for the inverse Hessian",
)
_DIRECTIONS = Option(
    "directions", "count", "1", "random directions of hypergradient=forward-gradient"
)
_RECOMMENDED = {
    name: Option(name, "count" if name == "q" else "number", "the task's", meaning)
    for name, meaning in MEANINGS.items()
}


def _effective_of(one: Field) -> schedules.Effective | None:
    """Return what a parameter follows from, if it follows from anything."""
    stated: schedules.Effective | None = one.metadata.get("effective")
    usual = _USUAL.get(one.name)
    if stated is None or usual is None:
        return stated or usual
    # The source of z's step is known by its name.
    return replace(stated, names=usual.names, over=stated.over or usual.over)


def _fields(entry: Entry) -> dict[str, Field]:
    """Return the fields that options set, by name; p is a size of the experiment."""
    for one in entry.parameters.values():
        if isinstance(one.type, str):
            raise InvalidInputError(
                f"{entry.name}: the type of {one.name} is text, which says not how it "
                "is read. Leave out `from __future__ import annotations`."
            )
    return {
        letter: one
        for letter, one in entry.parameters.items()
        if one.name != "local_steps"
    }


def _kind(one: Field) -> str:
    if one.type is int:
        return "count"
    if _words(one):
        return " or ".join(_words(one))
    return "number or schedule" if one.type == schedules.Schedule else "number"


def _words(one: Field) -> dict[str, Any]:
    """Return the words that a field takes, if it does, with what each one sets."""
    if one.type is bool:
        return {"true": True, "false": False}
    words = one.metadata.get("words", ())
    nothing = {"none": None} if words and one.default is None else {}
    return {**nothing, **{word: word for word in words}}


def _default(one: Field, entry: Entry) -> str:
    parts = entry.make.fixed if isinstance(entry.make, Preset) else {}
    if one.name in parts:
        return str(parts[one.name]).lower()
    if one.type == schedules.Schedule:
        return _SCHEDULE
    if one.default is MISSING:
        return "must be given"
    return "none" if one.default is None else str(one.default).lower()


def algorithm_from(
    entry: Entry, settings: Mapping[str, str], clients: int, local_steps: int
) -> AbstractAlgorithm:
    """Build an algorithm; of the settings those count that it knows."""
    given = {"participants": str(clients), **settings}
    return _Reader(entry, given, clients, local_steps).build()


@dataclass
class _Reader:
    """Reads the fields of one algorithm from its options."""

    entry: Entry
    options: Mapping[str, str]
    clients: int
    local_steps: int
    made: dict[str, Any] = field(default_factory=dict)

    def build(self) -> AbstractAlgorithm:
        """Read all fields."""
        of_letter = _fields(self.entry)
        # Parameters that others depend on come first.
        known = [_effective_of(one) for one in of_letter.values()]
        early = {name for one in known if one for name in one.after}
        order = sorted(of_letter.items(), key=lambda pair: pair[1].name not in early)
        for letter, one in order:
            if one.type != schedules.Schedule:
                self._read(letter, one)
        for letter, one in of_letter.items():
            if one.type == schedules.Schedule:
                rho1 = 1.0 if self._is_shape(letter) else self.made.get("rho1", 1.0)
                self.made[one.name] = self._schedule(letter, rho1)
        if "local_steps" in self.entry.parameters:
            self.made["local_steps"] = self.local_steps
        parameters = self.entry.parameters.items()
        made = {
            n: self.made[one.name] for n, one in parameters if one.name in self.made
        }
        return self.entry.make(**made)

    def _read(self, letter: str, one: Field) -> None:
        word, values = _WORDS.get(one.name, ("", {}))
        effective = _effective_of(one)
        if one.type is AbstractHypergradient:
            self.made[one.name] = self._estimator()
        elif letter in self.options:
            self.made[one.name] = self._value(letter, one)
        elif word in self.options:
            self.made[one.name] = self._word(word, values, word)
        elif effective is not None:
            self.made[one.name] = self._converted(one, effective)
        elif one.default is MISSING:
            raise InvalidInputError(
                f"{self.entry.name}: option {letter} has no value, and the task "
                f"recommends none. Give {letter}=VALUE "
                f"({one.metadata.get('meaning', 'a number')})."
            )

    def _estimator(self) -> AbstractHypergradient:
        known = {SERIES: (self.entry.rule, _OF_SERIES), **HYPERGRADIENTS}
        kind, letters = known[SERIES]
        if "hypergradient" in self.options:
            kind, letters = self._word("hypergradient", known, "value of hypergradient")
        if kind is RandomNeumann and "length" in self.options:
            words = {"random": RandomNeumann, "full": Neumann}
            kind = self._word("length", words, "length")
        given = [one for one in letters if one in self.options or one in _OF_SERIES]
        return kind(
            *(self._number(o) if o == "theta" else self._count(o) for o in given)
        )

    def _value(self, letter: str, one: Field) -> Any:
        if one.type is int:
            return self._count(letter)
        words = _words(one)
        if words:
            return self._word(letter, words, f"value of {letter}")
        return self._number(letter)

    def _word(self, name: str, words: Mapping[str, Any], kind: str) -> Any:
        """Return what a word sets; `kind` is what it is called where it is unknown."""
        if self.options[name] not in words:
            raise unknown_name(kind, self.options[name], words)
        return words[self.options[name]]

    def _converted(self, one: Field, effective: schedules.Effective) -> Any:
        name = next(
            (n for n in effective.names if n in self.options), effective.names[-1]
        )
        if one.type is int:
            return self._count(name)
        value = effective.convert(self._number(name), self.made)
        if effective.times is not None:
            value *= self.made.get(effective.times) or self.local_steps
        if effective.over is not None:
            value /= self._scale(effective.over) ** effective.power
        return value

    def _scale(self, name: str) -> float:
        """Return a schedule at t = 0 where there is one as a shape only, else 1."""
        known = self.entry.parameters.items()
        letters = [letter for letter, one in known if one.name == name]
        if not letters or not self._is_shape(letters[0]):
            return 1.0
        return float(self._schedule(letters[0], 1.0)(0))

    def _is_shape(self, letter: str) -> bool:
        """Say whether the effective values stay in force under a schedule.

        In the founding paper's parameters a constant eta, or any other, means what it
        means there: those that are not given are then the effective values at eta = 1.
        """
        known = self.entry.parameters.items()
        own = all(letter == one.name for letter, one in known)
        if not issubclass(self.entry.kind, Founding) or not own:
            return True
        others = {"alpha", "beta", "rho1", "rho2"} & self.options.keys()
        text = self.options.get(letter, "decay")
        return not others and text.startswith("decay")

    def _schedule(self, letter: str, rho1: float) -> Any:
        text = self.options.get(letter, _SCHEDULE)
        sizes = {"clients": self.clients, "local_steps": self.local_steps}
        return schedules.parse_schedule(text, **sizes, rho1=rho1)

    def _number(self, name: str) -> Any:
        """Read a number, or one in units that a run measures, such as 0.5/L."""
        auto = AUTO.get(name) or AUTO.get(f"{self._step_of(name)}_step")
        relative = read_relative(self.options.get(name, ""), auto and auto())
        return self._as(float, name, "number") if relative is None else relative

    def _step_of(self, letter: str) -> str:
        one = _fields(self.entry).get(letter)
        return one.metadata.get("step", "") if one else ""

    def _count(self, name: str) -> int:
        return self._as(int, name, "whole number")

    def _as(self, kind: Callable[[str], Any], name: str, told: str) -> Any:
        if name not in self.options:
            raise InvalidInputError(
                f"{self.entry.name}: option {name} has no value, and the task "
                f"recommends none. Give {name}=VALUE."
            )
        try:
            return kind(self.options[name])
        except ValueError:
            raise InvalidInputError(
                f"option {name}='{self.options[name]}' is not a {told}."
            ) from None


def as_options(entry: Entry, algorithm: AbstractAlgorithm) -> dict[str, str]:
    """Write the parameters of an algorithm as options that build it again."""
    written: dict[str, str] = {}
    settings = algorithm.settings()
    for letter, one in _fields(entry).items():
        value: Any = settings.get(one.name)
        if value is None:
            continue
        if isinstance(value, Neumann | RandomNeumann):
            if entry.rule is RandomNeumann:
                written["length"] = "full" if isinstance(value, Neumann) else "random"
            written |= {"q": str(value.q), "theta": _number_text(value.theta)}
        elif one.type is AbstractHypergradient:
            written |= _estimator_options(value)
        elif one.type == schedules.Schedule:
            written[letter] = _schedule_text(value)
        elif isinstance(value, bool):
            written[letter] = str(value).lower()
        elif isinstance(value, int | str):
            written[letter] = str(value)
        else:
            written[letter] = _number_text(value)
    return written


def _estimator_options(value: AbstractHypergradient) -> dict[str, str]:
    """Return what builds an estimator again; nothing if it has no name."""
    for name, (kind, letters) in HYPERGRADIENTS.items():
        if type(value) is kind:
            held = [getattr(value, one.name) for one in fields(kind)]
            texts = [str(v) if isinstance(v, int) else _number_text(v) for v in held]
            return {"hypergradient": name, **dict(zip(letters, texts, strict=False))}
    return {}


def _number_text(value: Any) -> str:
    return str(value) if isinstance(value, AbstractRelative) else repr(float(value))


def _schedule_text(value: Any) -> str:
    if isinstance(value, schedules.Constant):
        return _number_text(value.value)
    if isinstance(value, schedules.CubeRootDecay):
        return f"decay:{float(value.c0)!r}:{float(value.w0)!r}"
    if isinstance(value, schedules.PowerDecay):
        numbers = (value.c0, value.w0, value.power)
        return ":".join(["decay", *(repr(float(one)) for one in numbers)])
    if isinstance(value, schedules.TheoremThree):
        return f"theorem3:{float(value.l_hat)!r}:{float(value.l_phi)!r}"
    raise InvalidInputError(f"a schedule of type {type(value).__name__} has no text.")
