"""Readers of tables: CSV, Parquet, Excel, and frames of pandas or polars."""

import csv
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.datasets._base import open_text, reading
from fedbilevel.datasets._bounds import check_archive, check_size
from fedbilevel.datasets.table import Table, check_names, column_of
from fedbilevel.errors import InvalidInputError, needed


def read_table(path: Path) -> Table:
    """Read the table in a file, whose name says of which kind it is."""
    reader = READERS.get(kind_of(path))
    if reader is None:
        known = ", ".join(READERS)
        raise InvalidInputError(
            f"{path} is no table: its name ends in none of {known}."
        )
    return reader(path)


def kind_of(path: Path) -> str:
    """Return the ending of a file's name, a compression's aside."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _read_csv(path: Path) -> Table:
    with reading(path, "CSV"), open_text(path) as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        check_names(str(path), header)
        lines, rows = [], []
        for row in reader:
            if any("\0" in text for text in row):
                raise InvalidInputError(
                    f"{path}, line {reader.line_num}: it holds a byte 0, so it is no "
                    "text. Save the table again, as UTF-8."
                )
            if not row:
                continue
            if len(row) != len(header):
                raise InvalidInputError(
                    f"{path}, line {reader.line_num}: {len(row)} values, but the "
                    f"header names {len(header)} columns. Check quotes and commas."
                )
            lines.append(reader.line_num)
            rows.append([text.strip() for text in row])
    if not rows:
        raise InvalidInputError(f"{path} has a header but no rows.")
    columns = {}
    for name, texts in zip(header, zip(*rows, strict=True), strict=True):
        columns[name] = np.empty(len(texts), object)
        columns[name][:] = texts
    return Table(_name(path), str(path), columns, np.asarray(lines), "line")


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
    with reading(path, "Excel"):
        with zipfile.ZipFile(path) as archive:
            check_archive(path, archive)
        book = library.load_workbook(path, read_only=True, data_only=True)
        try:
            if len(book.worksheets) != 1:
                raise InvalidInputError(
                    f"{path} has {len(book.worksheets)} sheets, and a table is one. "
                    "Save the sheet alone."
                )
            every = [
                list(row) for row in book.worksheets[0].iter_rows(values_only=True)
            ]
        finally:
            book.close()
    header = [str(name or "").strip() for name in every[0]] if every else []
    check_names(str(path), header)
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
    count = len(found[0])
    return _table(Path("frame"), names, found, np.arange(count), "row")


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
    found: list[np.ndarray | str],
    places: np.ndarray,
    unit: str,
) -> Table:
    check_names(str(path), names)
    if len(places) == 0:
        raise InvalidInputError(f"{path} has a header but no rows.")
    pairs = list(zip(names, found, strict=True))
    columns = {name: one for name, one in pairs if not isinstance(one, str)}
    others = {name: one for name, one in pairs if isinstance(one, str)}
    return Table(_name(path), str(path), columns, places, unit, others)


def _name(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


READERS: Mapping[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".xlsx": _read_excel,
}
