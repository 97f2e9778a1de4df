"""Tables: columns and where each row is, read from CSV, Parquet, Excel and frames."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._table_choices import DECIMALS, SEPARATORS, TableChoices
from fedbilevel.datasets._files import check_size, reading, unpacking
from fedbilevel.datasets.cells import as_texts, is_number, parsed
from fedbilevel.datasets.delimited import decimal_of, read_cells, spelled
from fedbilevel.errors import InvalidInputError, needed


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of the same length.

    A column holds numbers, NaN where one is missing, or Python's texts, empty where one
    is missing; numbers may be written as text. Row i is `unit` number `places[i]` of
    `source`. `unreadable` has the columns that are neither, and what they are. Numbers
    in texts have the mark `decimal`. Of CSV, `separator` and `encoding` are known.
    """

    name: str
    source: str
    columns: Mapping[str, np.ndarray]
    places: np.ndarray
    unit: str = "row"
    unreadable: Mapping[str, str] = field(default_factory=dict)
    separator: str = ","
    encoding: str = ""
    decimal: str = "."
    # Numbers read from the texts of a column, kept since reading many takes a while.
    _read: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def where(self, row: int) -> str:
        """Say where a row is."""
        return f"{self.source}, {self.unit} {self.places[row]}"

    def take(self, rows: np.ndarray) -> "Table":
        """Return some of the rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, places=self.places[rows])

    def understood(self, choices: TableChoices, names: Collection[str]) -> "Table":
        """Return the table with the decimal mark that was chosen, or that `names` have.

        Columns that are not used may hold anything.
        """
        mark = DECIMALS.get(choices.decimal, choices.decimal)
        if not mark:
            used = {n: one for n, one in self.columns.items() if n in names}
            mark = decimal_of(self.source, used, self.separator)
        return replace(self, decimal=mark)

    def reading(self) -> str:
        """Say how the cells were read; nothing of kinds that say it themselves."""
        if not self.encoding:
            return ""
        return (
            f"{spelled(self.separator, SEPARATORS)} between cells, decimal "
            f"{spelled(self.decimal, DECIMALS)}, encoding {self.encoding}"
        )

    def is_numeric(self, name: str) -> bool:
        """Say whether a column is one of numbers: most of its values are, or all miss.

        A single word in it is then a mistake, and is refused where it is read.
        """
        numbers = self.numbers(name)
        there, finite = np.sum(~np.isnan(numbers)), np.sum(np.isfinite(numbers))
        return bool(2 * finite > there or not there)

    def numbers(self, name: str) -> np.ndarray:
        """Return a column of numbers: NaN where one is missing, infinity at a word."""
        if name not in self._read:
            self._read[name] = parsed(self.columns[name], self.decimal)
        return self._read[name]

    def is_missing(self, name: str) -> np.ndarray:
        """Mark the rows that have no value in a column."""
        if self.is_numeric(name):
            return np.isnan(self.numbers(name))
        return np.asarray([not text for text in as_texts(self.columns[name])], bool)


def column_of(values: Sequence[Any]) -> np.ndarray | str:
    """Make a column of Python's values of any kind, or say which kind it cannot be."""
    if all(_is_missing(one) or isinstance(one, int | float) for one in values):
        try:
            return np.asarray(
                [math.nan if _is_missing(v) else float(v) for v in values]
            )
        except OverflowError:
            return "numbers of more than 300 digits"
    texts, stripped = np.empty(len(values), object), {}
    for row, value in enumerate(values):
        if _is_missing(value):
            texts[row] = ""
        elif isinstance(value, str):
            # Equal texts stay one object, however often they are there.
            texts[row] = stripped.setdefault(value, value.strip())
        elif isinstance(value, int | float):
            texts[row] = repr(value)
        elif hasattr(value, "isoformat"):  # a date or a time
            texts[row] = value.isoformat()
        else:
            return f"values of type {type(value).__name__}"
    return texts


def _is_missing(value: Any) -> bool:
    nan = isinstance(value, float) and math.isnan(value)
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")


def check_names(source: str, names: Sequence[str]) -> None:
    """Raise unless columns have different names that are not numbers."""
    if all(is_number(name) for name in names):
        raise InvalidInputError(
            f"{source}, line 1: expected the names of the columns. Add a header row."
        )
    for name in [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInputError(
            f"{source}, line 1: two columns are named '{name}'. Rename one."
        )


def read_table(path: Path, choices: TableChoices | None = None) -> Table:
    """Read the table in a file, whose name says of which kind it is."""
    reader, chosen = READERS.get(kind_of(path)), choices or TableChoices()
    if reader is None:
        raise InvalidInputError(
            f"{path} is no table: its name ends in none of {', '.join(READERS)}."
        )
    if reader is _read_csv:
        letter = SEPARATORS.get(chosen.separator, chosen.separator)
        return _read_csv(path, chosen.encoding, letter)
    for name in ("separator", "encoding"):
        if getattr(chosen, name):
            raise InvalidInputError(
                f"--{name} {getattr(chosen, name)}: {path} is no CSV file, so it has "
                f"none. Leave --{name} out."
            )
    return reader(path)


def kind_of(path: Path) -> str:
    """Return the ending of a file's name, a compression's aside."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _read_csv(path: Path, encoding: str = "", separator: str = "") -> Table:
    with reading(path, "CSV"):
        read = read_cells(path, encoding, separator)
    cells = np.empty((len(read.rows), len(read.header)), object)
    if read.rows:
        cells[:] = read.rows
    found = list(np.ascontiguousarray(cells.T))
    table = _table(path, read.header, found, np.asarray(read.lines), "line")
    return replace(table, separator=read.separator, encoding=read.encoding)


def _read_parquet(path: Path) -> Table:
    sentence = "Parquet files are read by pyarrow: install fedbilevel[tables]."
    parquet = needed("pyarrow.parquet", sentence)
    with reading(path, "Parquet"):
        schema = parquet.read_schema(path)
        texts = [one.name for one in schema if str(one.type) in _TEXTS]
        # Kept as in the file, texts that repeat take no more memory than there.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            about = file.metadata
            groups = [about.row_group(one) for one in range(about.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            cells = about.num_rows * about.num_columns
            check_size(path, max(size, 8 * cells), "unpacked")
            read = file.read()
        names = [str(name) for name in read.column_names]
        found = [_arrow_column(read.column(place)) for place in range(len(names))]
    return _table(path, names, found, np.arange(read.num_rows), "row")


def _arrow_column(column: Any) -> np.ndarray | str:
    if column.null_count == 0 and str(column.type) in _PLAIN_NUMBERS:
        return column.to_numpy()
    if not str(column.type).startswith("dictionary"):
        return column_of(column.to_pylist())
    values = []
    for chunk in column.chunks:
        known = chunk.dictionary.to_pylist()
        codes = chunk.indices.to_pylist()
        values += [None if code is None else known[code] for code in codes]
    return column_of(values)


_TEXTS = {"string", "large_string"}
_PLAIN_NUMBERS = {"double", "float", "int64", "int32", "int16", "int8", "bool"}
_PLAIN_NUMBERS |= {"uint64", "uint32", "uint16", "uint8"}


def _read_excel(path: Path) -> Table:
    sentence = "Excel files are read by openpyxl: install fedbilevel[tables]."
    library = needed("openpyxl", sentence)
    with reading(path, "Excel"), unpacking(path):
        book = library.load_workbook(path, read_only=True, data_only=True)
        try:
            if len(book.worksheets) != 1:
                raise InvalidInputError(
                    f"{path} has {len(book.worksheets)} sheets, and a table is one. "
                    "Save the sheet alone."
                )
            rows = book.worksheets[0].iter_rows(values_only=True)
            every = [list(row) for row in rows]
        finally:
            book.close()
    header = [str(name or "").strip() for name in every[0]] if every else []
    kept = [n for n, row in enumerate(every) if n and any(v is not None for v in row)]
    rows = [every[n] + [None] * (len(header) - len(every[n])) for n in kept]
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    found = [column_of(values) for values in columns]
    return _table(path, header, found, np.asarray(kept, int) + 1, "row")


def table_of_frame(frame: Any) -> Table:
    """Make a table of a frame of pandas, polars, or anything with their columns."""
    kind = f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"
    if hasattr(frame, "collect"):  # asked for columns, a lazy one of polars computes
        raise InvalidInputError(f"{kind} is not computed yet. Give frame.collect().")
    if not hasattr(frame, "columns") or not hasattr(frame, "__getitem__"):
        raise InvalidInputError(
            f"{kind} is no frame. Give one of pandas or polars, with named columns."
        )
    names = [str(name) for name in frame.columns]
    check_names("the frame", names)
    found = [_frame_column(np.asarray(frame[name])) for name in frame.columns]
    return _table(Path("frame"), names, found, np.arange(len(found[0])), "row")


def _frame_column(values: np.ndarray) -> np.ndarray | str:
    if values.dtype.kind in "buif":
        return values
    if values.dtype.kind in "mM":
        # In nanoseconds, dates and durations would become numbers.
        values = values.astype(f"{values.dtype.kind}8[us]")
    numbers = np.number | np.bool_
    every = values.tolist()
    return column_of([v.item() if isinstance(v, numbers) else v for v in every])


def _table(
    path: Path,
    names: list[str],
    found: Sequence[np.ndarray | str],
    places: np.ndarray,
    unit: str,
) -> Table:
    check_names(str(path), names)
    if len(places) == 0:
        raise InvalidInputError(f"{path} has a header but no rows.")
    pairs = list(zip(names, found, strict=True))
    columns = {name: one for name, one in pairs if not isinstance(one, str)}
    others = {name: one for name, one in pairs if isinstance(one, str)}
    name = Path(path.name.removesuffix(".gz")).stem
    return Table(name, str(path), columns, places, unit, others)


READERS: Mapping[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".xlsx": _read_excel,
}
