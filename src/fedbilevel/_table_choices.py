"""Which column of a table is what, as tasks and commands let it be chosen.

Needs no NumPy: the help of commands shows what may be chosen.
"""

from dataclasses import dataclass, fields

from fedbilevel._schema import option
from fedbilevel.errors import InvalidInputError, unknown_name

_MISSING = ("refuse", "mean", "drop")
_PREDICTED = ("auto", "class", "number")


@dataclass(frozen=True)
class TableChoices:
    """Which column of a table is what; empty texts leave the choice to the table."""

    label: str = option("", "column to be predicted; `label`, or else the last one")
    site: str = option("", "column whose values are the clients, by name")
    group: str = option("", "column of the groups to compare; it is no feature")
    ignore: str = option("", "columns to leave out, separated by commas")
    missing: str = option(
        "refuse", "missing values: refuse, mean (fill them in) or drop (the rows)"
    )
    predict: str = option(
        "auto", "the label is a class or a number; auto: a number if any has a fraction"
    )
    preparation: str = option(
        "", "file of `fedbilevel prepare` that says how columns become features"
    )

    def __post_init__(self) -> None:
        known = {"missing": _MISSING, "predict": _PREDICTED}
        for name, words in known.items():
            if getattr(self, name) not in words:
                raise unknown_name(f"value of {name}", getattr(self, name), words)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The columns to leave out."""
        return tuple(name.strip() for name in self.ignore.split(",") if name.strip())

    @property
    def group_column(self) -> str:
        """The column of the groups; `group` may add one of its values after a colon."""
        return self.group.partition(":")[0]

    def check_unused(self, name: str) -> None:
        """Raise if something was chosen that only a table of columns has."""
        for one in fields(self):
            chosen = getattr(self, one.name) != one.default
            if chosen and one.name not in ("site", "group"):
                raise InvalidInputError(
                    f"{one.name}={getattr(self, one.name)}: {name} is no table with "
                    "named columns. Give a CSV, Parquet or Excel file."
                )
