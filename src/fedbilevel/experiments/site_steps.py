"""The steps that a server gives to sites that take them from it.

A trial is a run of its own, with steps, a seed and maybe rows that are held out; the
run itself is given the steps that were chosen. All of it is in the hello.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.searching import is_searched
from fedbilevel.federation.refusals import RefusedError, is_plain

_MOST_STEPS, _LONGEST, _LARGEST_SEED = 32, 40, 2**32 - 1


@dataclass(frozen=True)
class SiteSteps:
    """Steps as options write them, a seed, and whether sites hold rows out."""

    steps: Mapping[str, str]
    seed: int
    held_out: bool = False

    def info(self) -> dict[str, Any]:
        """Return it as a hello has it."""
        return asdict(self)

    def applied(self, experiment: Experiment) -> Experiment:
        """Return an experiment with these steps, and this seed."""
        options = {**without_searched(experiment).options, **self.steps}
        return replace(experiment, options=options, seed=self.seed)

    @staticmethod
    def read(info: Mapping[str, Any]) -> "SiteSteps":
        """Read the steps of a hello; refuse what no server of ours would send."""
        steps, seed, apart = (info.get(n) for n in ("steps", "seed", "held_out"))
        right = set(info) == {"steps", "seed", "held_out"}
        right &= type(seed) is int and 0 <= seed <= _LARGEST_SEED
        right &= type(apart) is bool and isinstance(steps, dict)
        if not right or len(steps) > _MOST_STEPS:  # type: ignore[arg-type]
            raise RefusedError("steps", "has no steps, seed and rows to hold out")
        for name, text in steps.items():  # type: ignore[union-attr]
            if not is_plain(name, _LONGEST) or not is_plain(text, _LONGEST):
                raise RefusedError("steps", f"{name!r:.40} cannot be {text!r:.40}")
        return SiteSteps(steps, seed, apart)  # type: ignore[arg-type]


def without_searched(experiment: Experiment) -> Experiment:
    """Return an experiment without the ranges and lists that are to be searched."""
    searched = {n for n, text in experiment.method_options.items() if is_searched(text)}
    kept = {n: text for n, text in experiment.options.items() if n not in searched}
    return replace(experiment, options=kept)
