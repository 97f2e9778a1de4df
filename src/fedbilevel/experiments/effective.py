"""What an effective step or weight means for the parameters of every method.

A parameter that is not given follows from an option that means the same for all
methods: its field says from which one (`fedbilevel.schedules.step` and `weight`).
Names that every method uses alike need not say so.
"""

from dataclasses import Field, replace

from fedbilevel.schedules import Effective

# Of steps that have a common shape over t, its parameter is a.
_USUAL = {
    "lr": Effective(("lower_step",)),
    "lr_x": Effective(("upper_step",), over="a"),
    "lr_y": Effective(("lower_step",), over="a"),
    "lr_z": Effective(("auxiliary_step", "lr_y", "lower_step"), over="a"),
    "theta": Effective(("theta",)),
    "terms": Effective(("q",)),
    "chains": Effective(("participants",)),
}


def effective_of(field: Field) -> Effective | None:
    """Return what a parameter follows from, if it follows from anything."""
    stated: Effective | None = field.metadata.get("effective")
    usual = _USUAL.get(field.name)
    if stated is None or usual is None:
        return stated or usual
    # What z's step follows from is known by its name.
    return replace(stated, names=usual.names, over=stated.over or usual.over)
