"""Who gets which rows: nothing lost, nothing twice, and the promised distribution."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedbilevel import report
from fedbilevel.datasets import from_arrays, partition
from fedbilevel.errors import InvalidInputError

CLASSES = 10
LABEL = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), 600))
SEEDED = {
    "iid": partition.iid,
    "dirichlet": partial(partition.dirichlet, concentration=0.3),
    "shards": partition.shards,
    "dominant": partial(partition.dominant, fraction=0.5),
}
EACH = pytest.mark.parametrize("split", SEEDED.values(), ids=SEEDED.keys())


def shares(split, clients: int, seeds: int) -> np.ndarray:
    """Return each client's share of each class, for each seed."""
    counts = [
        partition.label_counts(LABEL, split(LABEL, clients, seed), CLASSES)
        for seed in range(seeds)
    ]
    return np.stack(counts) / 600


# What all have in common


@EACH
@settings(max_examples=60)
@given(data=st.data())
def test_every_row_has_one_client(split, data):
    label = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=80)))
    # Half as many clients as rows leave two shards each.
    clients = data.draw(st.integers(1, len(label) // 2))
    seed = data.draw(st.integers(0, 2**32))
    parts = split(label, clients, seed)
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(label)))
    again = split(label, clients, seed)
    for part, same in zip(parts, again, strict=True):
        np.testing.assert_array_equal(part, same)


@EACH
def test_another_seed_gives_other_parts(split):
    one, other = (np.concatenate(split(LABEL, 10, seed)) for seed in (0, 1))
    assert (one != other).any()


@EACH
def test_a_cut_of_a_client_has_the_classes_of_the_whole(split):
    (part,) = split(LABEL, 1, 0)
    half = np.bincount(LABEL[part[:3000]], minlength=CLASSES)
    # Hypergeometric, deviation 11.6.
    assert np.abs(half - 300).max() < 5 * 11.6


@EACH
@pytest.mark.parametrize("clients", [0, -1, 6001])
def test_impossible_numbers_of_clients_are_refused(split, clients):
    with pytest.raises(InvalidInputError, match=f"partitioned among {clients} cl"):
        split(LABEL, clients, 0)


# The distributions


def test_iid_is_equal_and_within_binomial_bounds():
    parts = partition.iid(LABEL, 7, 0)
    assert {len(part) for part in parts} == {857, 858}
    held = shares(partition.iid, 6, 16) * 600
    deviation = np.sqrt(1000 * 0.1 * 0.9)
    assert np.abs(held - 100).max() < 5 * deviation
    # Drawn without replacement, the variance is a sixth smaller than binomial.
    assert np.var(held) == pytest.approx(deviation**2 * 5 / 6, rel=0.15)


@pytest.mark.parametrize("concentration", [0.1, 0.5, 5.0])
def test_dirichlet_has_its_mean_and_variance(concentration):
    clients, seeds = 5, 40
    split = partial(partition.dirichlet, concentration=concentration)
    found = shares(split, clients, seeds)
    # A share is Beta(a, (K - 1) a).
    variance = (1 / clients) * (1 - 1 / clients) / (clients * concentration + 1)
    error = np.sqrt(variance / (seeds * CLASSES))
    assert np.abs(found.mean(axis=(0, 2)) - 1 / clients).max() < 4 * error
    assert found.var() == pytest.approx(variance, rel=0.1)


def test_dirichlet_leaves_no_client_without_rows():
    for seed in range(16):
        parts = partition.dirichlet(LABEL[:60], 30, seed, 0.01)
        assert min(len(part) for part in parts) == 1
        assert sum(len(part) for part in parts) == 60


def test_shards_hold_few_classes():
    for seed in range(16):
        parts = partition.shards(LABEL, 100, seed)
        assert {len(part) for part in parts} == {60}
        held = partition.label_counts(LABEL, parts, CLASSES)
        # 200 shards of 30: none crosses a class.
        assert (held > 0).sum(axis=1).max() <= 2
        assert set(np.unique(held)) == {0, 30, 60}
    crossing = partition.label_counts(LABEL, partition.shards(LABEL, 7, 0), CLASSES)
    assert (crossing > 0).sum(axis=1).max() <= 4
    one = partition.label_counts(LABEL, partition.shards(LABEL, 10, 0, 1), CLASSES)
    assert ((one > 0).sum(axis=1) == 1).all()


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_dominant_meets_its_fraction(fraction):
    clients, quota = 20, 300
    split = partial(partition.dominant, fraction=fraction)
    held = shares(split, clients, 16) * 600
    assert (held.sum(axis=2) == quota).all()
    own = held[:, np.arange(clients), np.arange(clients) % CLASSES]
    assert own.min() >= fraction * quota - 1e-9
    # The rest is from a balanced pool.
    expected = quota * (fraction + (1 - fraction) / CLASSES)
    assert own.mean() == pytest.approx(expected, rel=0.05)


def test_dominant_falls_back_to_the_pool():
    label = np.asarray([0] * 10 + [1] * 90)
    parts = partition.dominant(label, 4, 0, 1.0)
    held = partition.label_counts(label, parts, 2)
    assert (held.sum(axis=1) == 25).all()
    # Class 0 is used up by client 0, which is filled up, as is client 2, by class 1.
    np.testing.assert_array_equal(held[:, 0], [10, 0, 0, 0])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (partial(partition.dirichlet, concentration=0), "concentration 0 must be"),
        (partial(partition.dirichlet, concentration=np.nan), "concentration nan"),
        (partial(partition.dirichlet, concentration=np.inf), "concentration inf"),
        (partial(partition.shards, per_client=0), "0 shards per client"),
        (partial(partition.shards, per_client=5), "3 clients with 5 shards"),
        (partial(partition.dominant, fraction=1.5), "fraction 1.5 must be between"),
    ],
)
def test_settings_out_of_range_are_refused(split, message):
    with pytest.raises(InvalidInputError, match=message):
        split(LABEL[:10], 3, 0)


# The user's own


def test_by_column_sorts_the_values():
    parts = partition.by_column(np.asarray(["b", "a", "b", "c"]))
    assert [list(part) for part in parts] == [[1], [0, 2], [3]]
    parts = partition.by_column(np.asarray([10, 9, 10]))
    assert [list(part) for part in parts] == [[1], [0, 2]]
    for bad in (np.zeros(0), np.zeros((2, 2))):
        with pytest.raises(InvalidInputError, match="Give one value per row"):
            partition.by_column(bad)


def test_own_lists_may_leave_rows_out():
    parts = partition.by_indices([[3, 1], (4,), np.asarray([0])], rows=6)
    assert [list(part) for part in parts] == [[3, 1], [4], [0]]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([], "there is no client"),
        ([[0], []], "client 1: .* at least one row index"),
        ([[0.0, 1.0]], "client 0: its rows are float64"),
        ([[True, False]], "client 0: its rows are bool"),
        ([[[0]]], "client 0: "),
        ([[0], [1, 6]], "client 1 has row 6, but rows go from 0 to 5"),
        ([[-1]], "client 0 has row -1"),
        ([[0, 1], [2, 1]], "row 1 is given to client 0 and again to client 1"),
        ([[0, 2, 2]], "row 2 is given to client 0 and again to client 0"),
    ],
)
def test_own_lists_are_checked(lists, message):
    with pytest.raises(InvalidInputError, match=message):
        partition.by_indices(lists, rows=6)


class Partition(dict):
    """A part of a Hugging Face data set, as far as it is used."""

    @property
    def column_names(self):
        return list(self)


class Partitioner:
    """A partitioner of Flower Datasets, as far as it is used."""

    def __init__(self, *partitions: Partition) -> None:
        self.partitions = partitions

    @property
    def num_partitions(self) -> int:
        return len(self.partitions)

    def load_partition(self, partition_id: int) -> Partition:
        return self.partitions[partition_id]


def test_flower_partitioners_give_their_rows():
    partitioner = Partitioner(Partition(index=[2, 0]), Partition(index=[1]))
    parts = partition.from_flower(partitioner, rows=3)
    assert [list(part) for part in parts] == [[2, 0], [1]]
    with pytest.raises(InvalidInputError, match="rows go from 0 to 1"):
        partition.from_flower(partitioner, rows=2)
    with pytest.raises(InvalidInputError, match="columns label, but no 'index'"):
        partition.from_flower(Partitioner(Partition(label=[2])), rows=2)


# As text


DATA = from_arrays(np.zeros((6000, 1)), LABEL, site=np.arange(6000) % 3)


@pytest.mark.parametrize(
    ("text", "direct"),
    [
        ("iid", lambda: partition.iid(LABEL, 5, 1)),
        ("dirichlet:0.3", lambda: partition.dirichlet(LABEL, 5, 1, 0.3)),
        ("shards:3", lambda: partition.shards(LABEL, 5, 1, 3)),
        ("dominant:0.5", lambda: partition.dominant(LABEL, 5, 1, 0.5)),
        ("column:site", lambda: partition.by_column(DATA.columns["site"])),
    ],
)
def test_text_names_a_way(text, direct):
    parts = partition.parse(text)(DATA, 5, 1)
    for part, expected in zip(parts, direct(), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shard:2", "unknown partition 'shard'. Did you mean 'shards'"),
        ("", "unknown partition ''.*Known: column, dirichlet"),
        ("iid:2", "write it as iid"),
        ("iid:", "write it as iid"),
        ("dirichlet", "write it as dirichlet:0.3"),
        ("dirichlet:", "write it as dirichlet:0.3"),
        ("dirichlet:x", "'x' is not a number.*dirichlet:0.3"),
        ("dirichlet:-1", "concentration -1.0 must be"),
        ("shards:1.5", "'1.5' is not a number of the right kind"),
        ("shards:0", "0 shards per client"),
        ("dominant:2", "fraction 2.0"),
        ("column", "write it as column:site"),
    ],
)
def test_text_that_names_none_is_refused(text, message):
    with pytest.raises(InvalidInputError, match=message):
        partition.parse(text)


def test_an_unknown_column_lists_the_known():
    with pytest.raises(InvalidInputError, match="column of arrays 'sit'.*Known: site"):
        partition.parse("column:sit")(DATA, 3, 0)


# Label counts


def test_label_counts_count_rows():
    label = np.asarray([0, 1, 1, 2])
    counts = partition.label_counts(label, [np.asarray([0, 1]), np.asarray([2])], 4)
    np.testing.assert_array_equal(counts, [[1, 1, 0, 0], [0, 1, 0, 0]])


def text_of(table) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().replace("┃", "│").splitlines()
    cells = [line.split("│")[1:-1] for line in lines if "│" in line]
    return [[cell.strip() for cell in line] for line in cells]


def test_the_table_has_totals():
    table = report.label_counts_table(np.asarray([[1, 1200], [3, 0]]), ("cat", "dog"))
    assert text_of(table) == [
        ["client", "cat", "dog", "rows"],
        ["0", "1", "1,200", "1,201"],
        ["1", "3", "0", "3"],
        ["all", "4", "1,200", "1,204"],
    ]


def test_the_table_sums_up_many_classes():
    counts = np.eye(2, 30, dtype=int) * 5 + 1
    names = [str(number) for number in range(30)]
    assert text_of(report.label_counts_table(counts, names)) == [
        ["client", "classes held", "rows of the largest", "rows"],
        ["0", "30", "6", "35"],
        ["1", "30", "6", "35"],
        ["all", "30", "7", "70"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (100, 10), (250, 30)])
def test_the_picture_has_room_for_every_client(clients, classes):
    counts = np.ones((clients, classes), int)
    counts[:, 0] = 0
    names = [str(number) for number in range(classes)]
    picture = report.draw_label_counts({"training": counts}, names)
    assert picture.startswith(b"\x89PNG")
    height = int.from_bytes(picture[20:24])
    assert 10 * clients < height < 3000
