"""Partitions of rows: one array of row indices per client.

Every partition with a seed gives each row to one client, in random order, so that a
client's rows can be cut into training and validation as they stand.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedbilevel.datasets._base import Dataset
from fedbilevel.errors import InvalidInputError, unknown_name

Parts: TypeAlias = list[np.ndarray]
Scheme: TypeAlias = Callable[[Dataset, int, int], Parts]


def iid(label: np.ndarray, clients: int, seed: int) -> Parts:
    """Partition the rows at random, equally up to one."""
    _check_clients(label, clients)
    return np.array_split(np.random.default_rng(seed).permutation(len(label)), clients)


def dirichlet(
    label: np.ndarray, clients: int, seed: int, concentration: float
) -> Parts:
    """Split every class by shares drawn from a symmetric Dirichlet distribution.

    A small concentration gives each class to few clients. A client left without any row
    is given one by the client that then has the most.
    """
    _check_clients(label, clients)
    _check_amount("dirichlet", concentration)
    generator = np.random.default_rng(seed)
    pieces: list[Parts] = [[] for _ in range(clients)]
    for rows in _rows_by_class(label, generator):
        shares = generator.dirichlet(np.full(clients, concentration))
        ends = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for client, piece in enumerate(np.split(rows, ends)):
            pieces[client].append(piece)
    parts = [generator.permutation(np.concatenate(piece)) for piece in pieces]
    for client, part in enumerate(parts):
        if len(part) == 0:
            donor = int(np.argmax([len(one) for one in parts]))
            parts[client], parts[donor] = parts[donor][:1], parts[donor][1:]
    return parts


def shards(label: np.ndarray, clients: int, seed: int, per_client: int = 2) -> Parts:
    """Sort the rows by label, cut them into shards and give each client a few.

    Shards are equal up to one row, so with two per client and many rows a class, a
    client sees about two classes.
    """
    _check_clients(label, clients)
    _check_amount("shards", per_client)
    if clients * per_client > len(label):
        raise InvalidInputError(
            f"{clients} clients with {per_client} shards each need as many rows, but "
            f"there are {len(label)}. Ask for fewer."
        )
    generator = np.random.default_rng(seed)
    ordered = np.concatenate(_rows_by_class(label, generator))
    cut = np.array_split(ordered, clients * per_client)
    given = generator.permutation(clients * per_client).reshape(clients, per_client)
    return [
        generator.permutation(np.concatenate([cut[number] for number in numbers]))
        for numbers in given
    ]


def dominant(label: np.ndarray, clients: int, seed: int, fraction: float) -> Parts:
    """Give client i a `fraction` of its rows from class i modulo the classes.

    First every client in turn draws from its class as long as that lasts. The rest of
    all classes is then given at random to fill the clients up to equal sizes, so a
    client may hold more of its class than `fraction`.
    """
    _check_clients(label, clients)
    _check_amount("dominant", fraction)
    generator = np.random.default_rng(seed)
    pools = _rows_by_class(label, generator)
    quotas = [len(part) for part in np.array_split(label, clients)]
    own = []
    for client, quota in enumerate(quotas):
        number = client % len(pools)
        taken = round(fraction * quota)
        own.append(pools[number][:taken])
        pools[number] = pools[number][taken:]
    rest = generator.permutation(np.concatenate(pools))
    missing = [quota - len(part) for quota, part in zip(quotas, own, strict=True)]
    fill = np.split(rest, np.cumsum(missing)[:-1])
    return [
        generator.permutation(np.concatenate(both))
        for both in zip(own, fill, strict=True)
    ]


def by_column(values: np.ndarray) -> Parts:
    """Make one client of every distinct value, in their order."""
    values = np.asarray(values)
    if values.ndim != 1 or len(values) == 0:
        raise InvalidInputError(
            f"the column has shape {values.shape}. Give one value per row."
        )
    _, codes, sizes = np.unique(values, return_inverse=True, return_counts=True)
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.cumsum(sizes)[:-1])


def by_indices(lists: Sequence[Any], rows: int) -> Parts:
    """Check lists of row indices, one per client; rows may be left out."""
    parts = [np.asarray(one) for one in lists]
    if not parts:
        raise InvalidInputError("there is no client. Give at least one list of rows.")
    owner = np.full(rows, -1)
    for client, part in enumerate(parts):
        if part.ndim != 1 or len(part) == 0 or part.dtype.kind not in "iu":
            raise InvalidInputError(
                f"client {client}: its rows are {part.dtype} of shape {part.shape}. "
                "Give a list of at least one row index."
            )
        for row in part[(part < 0) | (part >= rows)][:1]:
            raise InvalidInputError(
                f"client {client} has row {row}, but rows go from 0 to {rows - 1}."
            )
        _, first = np.unique(part, return_index=True)
        twice = np.delete(part, first)
        for row in np.concatenate([twice, part[owner[part] >= 0]])[:1]:
            other = client if row in twice else owner[row]
            raise InvalidInputError(
                f"row {row} is given to client {other} and again to client {client}. "
                "Give each row once."
            )
        owner[part] = client
    return parts


def from_flower(partitioner: Any, rows: int) -> Parts:
    """Take the rows from a partitioner of Flower Datasets.

    Its data set must have a column `index` that counts the rows from 0, for example
    `partitioner.dataset = datasets.Dataset.from_dict({"index": range(rows), "label":
    label})` with the library `datasets`.
    """
    lists = []
    for client in range(partitioner.num_partitions):
        partition = partitioner.load_partition(client)
        if "index" not in partition.column_names:
            raise InvalidInputError(
                f"partition {client} has the columns "
                f"{', '.join(partition.column_names)}, but no 'index'. Give the "
                "partitioner a data set with a column 'index' counting rows from 0."
            )
        lists.append(list(partition["index"]))
    return by_indices(lists, rows)


def label_counts(
    label: np.ndarray, parts: Sequence[np.ndarray], classes: int
) -> np.ndarray:
    """Count the rows of each class (columns) that each client (rows) holds."""
    return np.stack([np.bincount(label[part], minlength=classes) for part in parts])


def parse(text: str) -> Scheme:
    """Read a partition: iid, dirichlet:0.3, shards:2, dominant:0.5, column:site.

    The result takes a data set, the number of clients and a seed. A column has as many
    clients as it has values, whatever number is asked for.
    """
    name, _, value = text.partition(":")
    if name not in _SCHEMES:
        raise unknown_name("partition", name, _SCHEMES)
    example, split, kind = _SCHEMES[name]
    if bool(value) != (":" in example) or text.endswith(":"):
        raise InvalidInputError(f"partition '{text}': write it as {example}.")
    if name == "column":
        return lambda data, clients, seed: by_column(_column(data, value))
    try:
        amount = (kind(value),) if value else ()
    except ValueError:
        raise InvalidInputError(
            f"partition '{text}': '{value}' is not a number of the right kind. Write "
            f"it as {example}."
        ) from None
    for one in amount:
        _check_amount(name, one)
    return lambda data, clients, seed: split(data.label, clients, seed, *amount)


def _column(data: Dataset, name: str) -> np.ndarray:
    if name not in data.columns:
        raise unknown_name(f"column of {data.name}", name, data.columns)
    return data.columns[name]


# How each is written, what splits the rows, and the type of what follows the colon.
_SCHEMES: dict[str, tuple[str, Callable[..., Parts], type]] = {
    "iid": ("iid", iid, str),
    "dirichlet": ("dirichlet:0.3", dirichlet, float),
    "shards": ("shards:2", shards, int),
    "dominant": ("dominant:0.5", dominant, float),
    "column": ("column:site", by_column, str),
}


def _rows_by_class(label: np.ndarray, generator: np.random.Generator) -> Parts:
    return [generator.permutation(rows) for rows in by_column(label)]


def _check_clients(label: np.ndarray, clients: int) -> None:
    if not 1 <= clients <= len(label):
        raise InvalidInputError(
            f"{len(label)} rows cannot be partitioned among {clients} clients. "
            f"Ask for 1 to {len(label)}, so that each gets a row."
        )


def _check_amount(name: str, value: float) -> None:
    if name == "dirichlet" and not 0 < value < np.inf:
        raise InvalidInputError(f"concentration {value} must be a positive number.")
    if name == "shards" and value < 1:
        raise InvalidInputError(f"{value} shards per client: give at least 1.")
    if name == "dominant" and not 0 <= value <= 1:
        raise InvalidInputError(f"fraction {value} must be between 0 and 1.")
