"""Commands on rows: `label-counts` counts labels, `prepare` makes features."""

from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel._folders import check_file, require_new_file
from fedbilevel._schema import option
from fedbilevel._table_choices import FEWEST_ROWS, TableChoices
from fedbilevel.cli import arguments, checks
from fedbilevel.cli.output import Console, print_json
from fedbilevel.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    import numpy as np

    from fedbilevel.datasets import Sums
    from fedbilevel.experiments import Experiment
    from fedbilevel.tasks import Task


@arguments.takes(
    checks.new_file,
    experiment=arguments.EXPERIMENT.only(
        "task", "clients", "data", *arguments.TABLE, "settings"
    ),
)
def label_counts(
    experiment: "Experiment",
    out: Path | None = option(None, "file for the picture, PNG"),
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Show how many rows of each class every client trains with and validates with."""
    from fedbilevel._files import write_atomically
    from fedbilevel.report import draw_label_counts, label_counts_table

    built, known, unknown = experiment.build_task()
    for name in unknown:
        raise unknown_name("option", name, known)
    if not built.classes:
        raise InvalidInputError(
            f"the rows of task '{experiment.label}' have no classes to count. Choose "
            "one of regularization, cleaning, representation, loss-tuning."
        )
    levels = counts_by_level(built)
    if out is not None:
        write_atomically(out, draw_label_counts(levels, built.classes, built.names))
    if as_json:
        print_json({"classes": built.classes, "names": built.names, **levels})
        return
    for name, counts in levels.items():
        title = f"Rows for {name}"
        table = label_counts_table(counts, built.classes, title, built.names)
        Console().print(table)
    if out is not None:
        Console().print(f"Saved in {out}")


def counts_by_level(task: "Task") -> dict[str, "np.ndarray"]:
    """Return the rows of each client and class, for training and for validation."""
    import numpy as np

    data, counts = task.data, {}
    for name, level, sizes in (
        ("training", data.lower, data.lower_sizes),
        ("validation", data.upper, data.upper_sizes),
    ):
        # Clients are stacked; what follows a client's own rows is padding.
        held = zip(np.asarray(level["label"]), np.asarray(sizes), strict=True)
        counts[name] = np.stack(
            [np.bincount(row[:size], minlength=len(task.classes)) for row, size in held]
        )
    return counts


_UNCOUNTED = (
    "Some sums are of an earlier version, and do not say how many rows each site has: "
    "in a federation all sites count alike."
)


@arguments.takes(choices=arguments.of_table(*arguments.TABLE).without("preparation"))
def prepare(
    choices: TableChoices,
    files: list[Path] = option(
        MISSING, "tables, or files of sums that sites wrote", spelled=""
    ),
    sums: Path | None = option(
        None, "file for the sums: what this site gives to the others"
    ),
    out: Path | None = option(
        None, "file for the preparation, which all sites then use"
    ),
    minimum_rows: int = option(
        FEWEST_ROWS, "fewest rows of a table of which anything is reported"
    ),
) -> None:
    """Fit how columns become features, from tables or from the sums of sites.

    Each site writes its sums with --sums; one of them merges all with --out, given in
    the order of the sites' numbers: their rows are what they count in a federation.
    Sums are counts, means and squared deviations of numbers, and the values of text and
    label. Fewer than --minimum-rows numbers of a column are not reported, and a text in
    fewer than 5 rows of every site is "(other)", here and at prediction.
    """
    arguments.at_least_one(minimum_rows=minimum_rows)
    if sums is None and out is None:
        raise InvalidInputError(
            "give --sums FILE for what this site gives, or --out FILE for the "
            "preparation of all."
        )
    for path in (one for one in (sums, out) if one is not None):
        check_file(path)
        require_new_file(path)
    from fedbilevel._files import write_atomically
    from fedbilevel.datasets import Preparation, Sums

    merged = Sums.merged([_sums_in(path, choices, minimum_rows) for path in files])
    if sums is not None:
        write_atomically(sums, merged.to_json())
    if out is not None:
        made = Preparation.fit(merged, gaps=choices.missing == "mean")
        made = replace(made, sites=merged.sites)
        write_atomically(out, made.to_json())
        found = f"{len(made.feature_names)} features of {merged.rows} rows"
        _say(f"{found}: {out}")
        same = [name for name in merged.columns if name not in made.names]
        if same:
            _say(f"Left out, the same in every row: {', '.join(same)}.")
        if len(made.sites) != 1:
            every = enumerate(made.sites)
            held = ", ".join(f"client {k} has {rows}" for k, rows in every)
            _say(f"In a federation {held}." if held else _UNCOUNTED)


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, soft_wrap=True)


def _sums_in(path: Path, choices: TableChoices, minimum: int) -> "Sums":
    """Return the sums in a file, or those of its table; say what they withhold."""
    from fedbilevel.datasets import Sums
    from fedbilevel.datasets.encoding import sums_of_table
    from fedbilevel.datasets.tables import read_table

    if path.suffix.lower() == ".json":
        try:
            return Sums.from_json(path.read_text(encoding="utf-8"))
        except ValueError as error:  # of its encoding, or of what it says
            raise InvalidInputError(f"{path}: {error}") from None
    table = read_table(path, choices)
    table = table.understood(choices, set(table.columns) - {*choices.ignored})
    if table.reading():
        _say(f"{path}: {table.reading()}.")
    told, whole = (sums_of_table(table, choices, few) for few in (minimum, 1))
    kept = [name for name in told.columns if told.columns[name] != whole.columns[name]]
    if kept:
        _say(f"{path}: of {', '.join(kept)} not all is reported: too few rows have it.")
    return told
