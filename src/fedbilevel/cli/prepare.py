"""The command `prepare`: how columns become features, agreed on by all sites."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedbilevel._folders import check_file, require_new_file
from fedbilevel._table_choices import TableChoices
from fedbilevel.cli.arguments import TABLE, Argument, Group, option, takes
from fedbilevel.errors import InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.datasets import Sums

__all__ = ["prepare"]


def _read(files: list[Path], **given: str | None) -> tuple[list[Path], TableChoices]:
    chosen = {name: text for name, text in given.items() if text is not None}
    return files, TableChoices(**chosen)


_CHOICES = Group(
    {
        "files": Argument(
            Annotated[
                list[Path],
                typer.Argument(help="tables, or files of sums that sites wrote"),
            ]
        ),
        **{
            name: option(str | None, None, meaning)
            for name, meaning in TABLE.items()
            if name != "preparation"
        },
        "predict": option(str | None, None, "auto, class or number: what the label is"),
    },
    _read,
)


@takes(asked=_CHOICES)
def prepare(
    asked: tuple[list[Path], TableChoices],
    sums: Annotated[
        Path | None,
        typer.Option(help="file for the sums: what this site tells the others"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="file for the preparation, which all sites then use"),
    ] = None,
) -> None:
    """Fit how columns become features, from tables or from the sums of sites.

    Each site writes its sums with --sums; one of them merges all with --out. Sums are
    counts, means and squared deviations of numbers, and the values of text and label.
    """
    files, choices = asked
    if sums is None and out is None:
        raise InvalidInputError(
            "give --sums FILE for what this site tells, or --out FILE for the "
            "preparation of all."
        )
    for path in (one for one in (sums, out) if one is not None):
        check_file(path)
        require_new_file(path)
    from fedbilevel._files import write_atomically
    from fedbilevel.datasets import Preparation, Sums

    merged = Sums.merged([_sums_in(path, choices) for path in files])
    if sums is not None:
        write_atomically(sums, lambda file: file.write(merged.to_json().encode()))
    if out is not None:
        made = Preparation.fit(merged, gaps=choices.missing == "mean")
        write_atomically(out, lambda file: file.write(made.to_json().encode()))
        told = f"{len(made.feature_names)} features of {merged.rows} rows"
        Console(stderr=True).print(f"{told}: {out}", markup=False, soft_wrap=True)


def _sums_in(path: Path, choices: TableChoices) -> "Sums":
    """Return the sums in a file, or those of the table in it."""
    from fedbilevel.datasets import Sums
    from fedbilevel.datasets.encoding import sums_of_table
    from fedbilevel.datasets.tables import read_table

    if path.suffix.lower() != ".json":
        return sums_of_table(read_table(path), choices)
    try:
        return Sums.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of its encoding, or of what it says
        raise InvalidInputError(f"{path}: {error}") from None
