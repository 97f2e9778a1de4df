"""Packets and files are plain numbers, and no rows or private blocks are in them."""

import ast
import json
from pathlib import Path

import jax
import numpy as np

import fedbilevel
from fedbilevel.experiments.federated import serve
from fedbilevel.federation import Terms
from fedbilevel.federation.wire import unpack
from tests.federation import Loopback
from tests.planted import (
    Planted,
    assert_plain_arrays,
    settings,
    shared_values,
    sites_with_rows,
)

SOURCE = Path(fedbilevel.__file__).parent
FORBIDDEN = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def calls_of_danger(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {module, *(alias.name for alias in node.names)}
            found += [name for name in names if name.split(".")[0] in FORBIDDEN]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        loads = called in ("np.load", "numpy.load") or "allow_pickle" in given
        if called in ("eval", "exec", "compile") or called.endswith("torch.load"):
            found.append(called)
        if loads and given.get("allow_pickle") != "False":
            found.append(ast.unparse(node))
    return found


def test_nothing_is_unpickled_or_evaluated():
    bad = "import pickle\nnp.load(p)\nnp.load(p, allow_pickle=True)\neval(t)"
    assert len(calls_of_danger(ast.parse(bad))) == 4
    for path in SOURCE.rglob("*.py"):
        assert not calls_of_danger(ast.parse(path.read_text())), path


def test_rows_are_found_however_they_are_written():
    table = np.random.default_rng(0).normal(size=(4, 3))
    search = Planted([table])
    forms = [table.astype(kind)[1:2].tobytes() for kind in ("<f4", ">f4", "<f8", ">f8")]
    forms += [table.T.astype("<f4")[:1].tobytes(), json.dumps(table[0, 0]).encode()]
    for form in forms:
        for before in range(8):
            assert search.found_in(bytes(before) + form)
    assert not search.found_in((table + 1).tobytes() + json.dumps(1.5).encode())


def test_neither_rows_nor_private_blocks_are_in_any_packet(tmp_path):
    sites, rows = sites_with_rows(tmp_path, "cleaning", corrupted="0")
    net = Loopback(dict(enumerate(sites)))
    serve(net, settings("cleaning", corrupted="0"), tmp_path / "run", Terms(patience=1))
    packets = [part for _, *both in net.sent for part in both if part]
    for packet in packets:
        # A header, the numbers it lists, and not a byte more.
        header, listed, body = unpack(packet, 1 << 20)
        sizes = [np.dtype(kind).itemsize * np.prod(shape) for kind, shape, _ in listed]
        absent = [reference is not None for *_, reference in listed]
        assert len(body) == sum(np.where(absent, 0, sizes))
        assert all(kind[:2] in ("<f", "<i") for kind, *_ in listed), header
    weights = []
    for site in sites:
        (checkpoints,) = site.checkpoints.values()
        weights += jax.tree.leaves([kept.own for kept in checkpoints.kept.values()])
    # States to go back to are kept two in an array.
    weights = [np.atleast_2d(one) for one in weights]
    private, sent = Planted(np.concatenate(weights)[None]), b"".join(packets)
    assert len(private.text) > 10 and private.found_below(tmp_path / "state")
    assert rows.found_below(tmp_path / "rows0") and rows.found_below(tmp_path / "rows1")
    for secret in (rows, private):
        assert not secret.found_in(sent) and not secret.found_below(tmp_path / "run")
    assert shared_values(tmp_path / "run").found_in(sent)
    assert_plain_arrays(tmp_path)
