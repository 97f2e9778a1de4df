"""Which column of a table is what, as tasks and commands let it be chosen.

Needs no NumPy: the help of commands shows what may be chosen.
"""

import codecs
import csv
import io
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields

from fedbilevel._schema import option
from fedbilevel.errors import InvalidInputError, unknown_name

_MISSING = ("refuse", "mean", "drop")
_LABELS = ("auto", "classes", "number")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
DECIMALS = {"point": ".", "comma": ","}
FEWEST_ROWS = 10  # of which a site reports sums, unless fewer are allowed


def listed_names(text: str) -> tuple[str, ...]:
    """Return names that are separated by commas; quotes keep a comma in a name."""
    try:
        rows = [*csv.reader([text], skipinitialspace=True)]
    except csv.Error as error:
        raise InvalidInputError(f"{text!r:.80} is no list of names: {error}.") from None
    return tuple(name.strip() for row in rows for name in row if name.strip())


def ignoring(names: Iterable[str]) -> str:
    """Return the option that leaves columns out, as a shell takes it."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names)
    return f"--ignore {shlex.quote(line.getvalue())}"


@dataclass(frozen=True)
class TableChoices:
    """Which column of a table is what; empty texts leave the choice to the table."""

    label: str = option("", "column to be predicted; `label`, or else the last one")
    site: str = option("", "column whose values are the clients, by name")
    group: str = option("", "column of the groups to compare; it is no feature")
    ignore: str = option(
        "", "columns to leave out, separated by commas; may be repeated"
    )
    missing: str = option(
        "refuse", "missing numbers: refuse, mean (fill them in) or drop (the rows)"
    )
    label_kind: str = option(
        "auto", "the label is classes or number; auto: a number if any has a fraction"
    )
    preparation: str = option(
        "", "file of `fedbilevel prepare` that says how columns become features"
    )
    separator: str = option(
        "", "of CSV cells: comma, semicolon, tab or pipe; detected if left out"
    )
    decimal: str = option(
        "", "decimal mark of numbers: point or comma; detected if left out"
    )
    encoding: str = option(
        "", "of CSV: utf-8, cp1252, latin-1, utf-16, ...; detected if left out"
    )

    def __post_init__(self) -> None:
        letters = {"separator": SEPARATORS, "decimal": DECIMALS}
        known = {"missing": _MISSING, "label_kind": _LABELS}
        known |= {n: ("", *one, *one.values()) for n, one in letters.items()}
        for name, words in known.items():
            if getattr(self, name) not in words:
                shown = [word for word in words if word.isalpha()]
                raise unknown_name(f"value of {name}", getattr(self, name), shown)
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError:
            few = ("utf-8", "utf-16", "cp1252", "latin-1")
            raise unknown_name("encoding", self.encoding, few) from None

    @property
    def ignored(self) -> tuple[str, ...]:
        """The columns to leave out."""
        return listed_names(self.ignore)

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


# Names in the options of an experiment that are flags of their own.
FLAGS = ("data", *(one.name for one in fields(TableChoices)))
