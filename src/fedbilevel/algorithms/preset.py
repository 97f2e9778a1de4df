"""A method that is another one with parts: a name, a reference, and the parts."""

import importlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Builds the method `of` with some parameters fixed, and is called like a class.

    `of` is a module of this package, which is imported when the preset is used.
    `fixed` are values of parameters, which may be options of a wrapper. `wrap` names
    wrappers whose parameters the preset takes beside those of the method. `letters`
    are the parameter names of the preset's own paper, in the order of positional
    arguments, as in "lr_x a=eta": a stands for eta.
    `pools` asks for the rows of all clients on one machine (`ClientData.pooled`),
    `series` names the hypergradient estimator that is made of Q and theta where the
    method is chosen by its name.
    """

    name: str
    of: str
    summary: str
    reference: str
    provenance: str
    answers: str = "shared y"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    letters: str = ""
    wrap: tuple[str, ...] = ()
    pools: bool = False
    series: str = "Neumann"

    @property
    def about(self) -> str:
        """The equations, exchanges and deviations."""
        text = Path(__file__).with_name("presets.md").read_text(encoding="utf-8")
        _, _, rest = text.partition(f"\n## {self.name}\n")
        return rest.partition("\n## ")[0].strip("\n")

    @property
    def title(self) -> str:
        """The name in `presets.py`, or in commands for one of another package."""
        presets = importlib.import_module("fedbilevel.algorithms.presets")
        own = (name for name, one in vars(presets).items() if one is self)
        return next(own, self.name)

    @property
    def kind(self) -> type:
        """The class of the method."""
        module = importlib.import_module(f"fedbilevel.algorithms.{self.of}")
        (public,) = module.__all__
        return getattr(module, public)

    @property
    def rule(self) -> type:
        """The hypergradient estimator that is made of Q and theta."""
        from fedbilevel import hypergradient

        return getattr(hypergradient, self.series)

    @property
    def parameters(self) -> dict[str, Field]:
        """Every parameter by the preset's own name for it, with the field it sets."""
        from fedbilevel.algorithms.base import declared
        from fedbilevel.algorithms.wrappers import options_for

        own = declared(self.kind) | options_for(self.kind)
        for wrapper in self._wrappers():
            own |= wrapper.parameters
        renamed = self._letters()
        rest = [n for n in own if n not in {*self.fixed, *renamed.values()}]
        return {**{a: own[b] for a, b in renamed.items()}, **{n: own[n] for n in rest}}

    def _letters(self) -> dict[str, str]:
        pairs = (one.partition("=") for one in self.letters.split())
        return {letter: name or letter for letter, _, name in pairs}

    def _wrappers(self) -> list[Any]:
        from fedbilevel.algorithms.wrappers import WRAPPERS

        return [WRAPPERS[name] for name in self.wrap]

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What `help` shows: the summary, and the meanings of parameters."""
        from fedbilevel.schedules import with_meanings

        meanings = {
            name: one.metadata["meaning"]
            for name, one in self.parameters.items()
            if "meaning" in one.metadata
        }
        text = f"{self.summary}\n\n    A preset of `{self.kind.__name__}`."
        return with_meanings(text, meanings)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Build the method."""
        letters = self._letters()
        given = dict(zip(letters, values, strict=False))
        if len(values) > len(letters) or given.keys() & named.keys():
            raise TypeError(
                f"positional arguments are {', '.join(letters) or 'not taken'}, "
                "each at most once."
            )
        found = {letters.get(n, n): v for n, v in (given | named).items()}
        found = {**self.fixed, **found}
        wrappers = []
        for one in self._wrappers():
            own = {n: found.pop(n) for n in one.parameters if n in found}
            wrappers.append((one, own))
        made = self.kind(**found)
        for one, own in wrappers:
            made = one.make(made, **own)
        return replace(made, named=self.title)

    def __hash__(self) -> int:
        return hash(self.name)

    def __or__(self, other: Any) -> Any:
        """Let annotations and `isinstance` have `FedBiOControls | None`."""
        return _Either(_kinds(self) | _kinds(other))

    __ror__ = __or__

    def __instancecheck__(self, instance: Any) -> bool:
        """Say whether this preset made a method, so that `isinstance` works."""
        return getattr(instance, "named", None) == self.title


@dataclass(frozen=True)
class _Either:
    """Kinds, some of them presets, of which a value has one.

    Python's own union takes classes alone where it is asked by `isinstance`.
    """

    __args__: frozenset

    def __or__(self, other: Any) -> Any:
        return _Either(self.__args__ | _kinds(other))

    __ror__ = __or__

    def __instancecheck__(self, instance: Any) -> bool:
        """Say whether a value is of one of the kinds."""
        return any(isinstance(instance, one) for one in self.__args__)

    def __call__(self) -> None:
        """Raise: it can be called only so that `get_type_hints` takes it for a type."""
        raise TypeError("a union of kinds cannot be made.")


def _kinds(one: Any) -> frozenset:
    """Return the members of a union, or the one kind."""
    if isinstance(one, _Either | UnionType):
        return frozenset(one.__args__)
    return frozenset([NoneType if one is None else one])
