"""A method that is another one with other parts: a name, a reference and the parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fedbilevel.algorithms._base import AbstractAlgorithm
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.schedules import with_meanings

__all__ = ["Preset"]


@dataclass(frozen=True)
class Preset:
    """Builds the algorithm `kind` with some fields fixed; called like a class.

    `letters` are the names of the preset's own paper, in the order of positional
    arguments, with the field that each stands for. `pools` asks for the rows of all
    clients on one machine (`ClientData.pooled`), `rule` is the hypergradient that is
    made of Q and theta where the method is chosen by its name.
    """

    kind: type[AbstractAlgorithm]
    summary: str
    reference: str
    provenance: str
    answers: str = AbstractAlgorithm.answers
    parts: Mapping[str, Any] = field(default_factory=dict)
    letters: Mapping[str, str] = field(default_factory=dict)
    pools: bool = False
    rule: type[AbstractHypergradient] = AbstractAlgorithm.rule

    def __post_init__(self) -> None:
        # What `help` shows of an object is this, or else what it shows of its class.
        object.__setattr__(self, "__doc__", self._documented())

    def _documented(self) -> str:
        by_name = {one.name: one for one in fields(self.kind)}
        rest = [n for n in by_name if n not in {*self.parts, *self.letters.values()}]
        letters = {**self.letters, **{name: name for name in rest}}
        meanings = {
            letter: by_name[name].metadata["meaning"]
            for letter, name in letters.items()
            if "meaning" in by_name[name].metadata
        }
        text = f"{self.summary}\n\n    A preset of `{self.kind.__name__}`."
        return with_meanings(text, meanings)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Build the algorithm."""
        given = dict(zip(self.letters, values, strict=False))
        if len(values) > len(self.letters) or given.keys() & named.keys():
            raise TypeError(
                f"positional arguments are {', '.join(self.letters) or 'not taken'}, "
                "each at most once."
            )
        fields = {self.letters.get(n, n): v for n, v in (given | named).items()}
        return self.kind(**{**self.parts, **fields})
