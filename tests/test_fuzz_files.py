"""Every file that the package reads, with whatever may stand in it.

A file that was changed is read, or refused by an error of the package; no other error
leaves a reader, and none takes more memory than a small file can need. Changes know the
format: a name or a number of JSON, an array of an archive, a cell of a table, with
digests made right again. Hypothesis is led by how many lines of the package a change
reaches, so that it does not stop at the first check.
"""

import functools
import gzip
import io
import json
import random
import struct
import tracemalloc
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from benchmarks.tests_of_lines import Lines
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from fedbilevel import saved
from fedbilevel._files import read_arrays
from fedbilevel.datasets import Preparation, load
from fedbilevel.datasets.sums import Sums
from fedbilevel.datasets.texts import read_texts
from fedbilevel.deployment.kept_nodes import _read
from fedbilevel.errors import ConfigurationWarning, DamagedFileWarning, FedbilevelError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.clients import read_participation
from fedbilevel.experiments.comparison import _check_folder
from fedbilevel.experiments.comparison import compare as run_comparison
from fedbilevel.experiments.federated import _begun
from fedbilevel.experiments.theory import follow_file
from fedbilevel.federation import PROTOCOL, SiteLimits
from fedbilevel.federation.checkpoints import SiteCheckpoints
from fedbilevel.federation.ledger import ServerReleases, SiteLedger
from fedbilevel.federation.own_rows import OwnRows, rows_of_files
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.site import SiteSecrets
from fedbilevel.federation.signatures import (
    make_key_pair,
    read_private_key,
    read_public_key,
)
from fedbilevel.federation.wire import RefusedError
from fedbilevel.models import Model
from fedbilevel.models.checkpoints import read_checkpoint
from fedbilevel.models.model import _digest
from fedbilevel.models.peft import read_adapters
from fedbilevel.models.transformer import draw_adapters, initialize
from fedbilevel.result import Result
from fedbilevel.runtime import checkpoint
from fedbilevel.runtime.privacy import privacy_of_releases
from fedbilevel.studies.comparison import Comparison, _timed
from fedbilevel.studies.tuning import _count_kept
from fedbilevel.theory.plan import Calibration, Parameters, practical_plan
from fedbilevel.tracking import _end_before
from tests.changed_files import announcing, as_npy, changed_file
from tests.federation import site_job
from tests.test_checkpoints import CONFIG, MADE, PLACES, kept, moved
from tests.test_site_limits import NOISY, PLAIN, job_with

LARGEST_COST = 64 * 2**20  # bytes that reading a small file may take


@dataclass
class Decoder:
    """What reads a folder with some files, and files that it takes."""

    read: Callable[[Path], object]
    files: dict[str, bytes]
    mend: Callable[[Path], None] = lambda folder: None
    seen: Counter[str] = field(default_factory=Counter)

    def attack(self, draw: random.Random, folder: Path, lines: Lines) -> int:
        """Change a file or two; return how many lines of the package that reached."""
        self.write(folder)
        for _ in range(draw.choice((1, 1, 1, 2))):
            name = draw.choice(sorted(self.files))
            changed = changed_file(name, (folder / name).read_bytes(), draw)
            (folder / name).write_bytes(changed)
        if draw.random() < 0.8:
            self.mend(folder)
        with lines.watched() as reached:
            self.try_to_read(folder)
        return sum(bits.bit_count() for bits in reached.values())

    def write(self, folder: Path) -> None:
        """Write the files as they should be."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def try_to_read(self, folder: Path) -> None:
        """Read the folder, or see it refused."""
        tracemalloc.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedFileWarning)
                warnings.simplefilter("ignore", ConfigurationWarning)
                self.read(folder)
            self.seen["read"] += 1
        except (FedbilevelError, RefusedError) as error:
            assert str(error)
            self.seen["refused"] += 1
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < LARGEST_COST, peak


# What is read, and by whom


def mend_model(folder: Path) -> None:
    """Write the digest anew, as somebody would who knows how it is made."""
    path, weights = folder / "model.json", folder / "model.safetensors"
    try:
        held = json.loads(path.read_bytes())
        held["digest"] = _digest(weights.read_bytes(), held)
        path.write_text(json.dumps(held))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return  # that is refused before


def run_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a short run on a small table."""
    draw = np.random.default_rng(3)
    rows = draw.standard_normal((60, 2)).round(2)
    lines = [f"{a},{b},{'ab'[k % 2]},{int(a + b > 0)}" for k, (a, b) in enumerate(rows)]
    (folder / "t.csv").write_text("\n".join(["first,second,third,label", *lines]))
    out = folder / "run"
    experiment = Experiment(
        "regularization", clients=2, rounds=2, options={"data": str(folder / "t.csv")}
    )
    experiment.run().save(out)
    experiment.save(out)
    return {one.name: one.read_bytes() for one in out.iterdir() if one.is_file()}


def of(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    assert set(names) <= set(files), set(files)
    return {name: files[name] for name in names}


def of_runs(folder: Path) -> dict[str, Decoder]:
    files = run_folder(folder)
    parts = of(files, "result.json", "columns.npz", "point.npz", "quality.json")
    setting = of(files, "experiment.json")
    like = {"x": jnp.zeros(3), "y": jnp.ones((2, 2))}
    columns = {"round": np.arange(3), "upper_loss": np.ones(3)}
    snapshot = checkpoint.Snapshot(like, columns, 2, {"run": 1.0})
    written = checkpoint.save(folder, snapshot, "f").read_bytes()
    unfinished = {"checkpoint.npz": written, **setting}

    def continued(place: Path) -> None:
        found = checkpoint.load(place, like, "f")
        assert found is not None and found.state["x"].shape == (3,)
        assert found.state["y"].shape == (2, 2)

    return {
        "experiment": Decoder(Experiment.load, setting),
        "result": Decoder(lambda place: Result.load(place, with_model=False), parts),
        "report": Decoder(saved.read_saved, parts | setting | of(files, "model.json")),
        "unfinished": Decoder(saved.read_saved, unfinished),
        "checkpoint": Decoder(continued, unfinished),
        "model": Decoder(
            Model.load, of(files, "model.json", "model.safetensors"), mend_model
        ),
    }


def of_federations(folder: Path) -> dict[str, Decoder]:
    begun = {"protocol": PROTOCOL, "federation": "f", "settings": "s", "attempt": 1}
    start: Any = {"x": np.zeros(3)}
    kept = SiteCheckpoints(start, folder, "f", 0)
    kept.put(1, start, 0)
    kept.save()
    secrets = SiteSecrets("f", 0, folder, Cohorts(2))
    secrets._save()
    make_key_pair(folder / "key")
    keys = {name: (folder / name).read_bytes() for name in ("key", "key.pub")}
    masks = {"f.keys.json": (folder / "f.keys.json").read_bytes()}
    states = {"f.npz": (folder / "f.npz").read_bytes()}

    def key_pair(place: Path) -> None:
        read_public_key(place / "key.pub")
        read_private_key(place / "key")

    return {
        "federation": Decoder(
            lambda place: _begun(place / "federation.json"),
            {"federation.json": json.dumps(begun).encode()},
        ),
        "keys": Decoder(key_pair, keys),
        "masks": Decoder(lambda place: SiteSecrets("f", 0, place, Cohorts(2)), masks),
        "states": Decoder(lambda place: SiteCheckpoints(start, place, "f", 0), states),
    }


TABLE = "site,first,second,label\n" + "".join(
    f"{'ab'[k % 2]},{k}.5,{'xyz'[k % 3]},{k % 2}\n" for k in range(9)
)
NUMBER = {"name": "first", "kind": "number", "count": 9, "mean": 1.0, "squares": 2.0}
TEXT = {"name": "third", "kind": "text", "values": ["a", "b"]}
LABEL = {"name": "label", "kind": "text", "values": ["0", "1"]}
SUMS = {"fedbilevel": "sums", "version": 1, "rows": 9, "sites": [4, 5]}
SUMS |= {"columns": [NUMBER, TEXT], "label": LABEL}


def of_data(folder: Path) -> dict[str, Decoder]:
    rows, label = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    arrays = {"features": rows, "label": label, "site": label}
    np.savez(folder / "d.npz", **arrays)
    sums = json.dumps(SUMS)
    prepared = Preparation.fit(Sums.from_json(sums)).to_json()
    line = json.dumps({"prompt": "ab", "response": "c"})
    texts = {"s/web.jsonl": f"{line}\n{line}\n".encode(), "s/trusted.jsonl": b""}
    texts["s/trusted.jsonl"] = texts["s/web.jsonl"]
    sparse = b"1 1:0.5 3:2\n-1 2:1e3\n1 1:4\n"

    def again(kind: Any, name: str) -> Callable[[Path], None]:
        def read(place: Path) -> None:
            made = kind.from_json((place / name).read_text(errors="replace"))
            assert kind.from_json(made.to_json()) == made

        return read

    folder_of = {f"d/{name}.npy": as_npy(one) for name, one in arrays.items()}
    return {
        "csv": Decoder(lambda at: load(str(at / "t.csv")), {"t.csv": TABLE.encode()}),
        "npz": Decoder(
            lambda at: load(str(at / "d.npz")),
            {"d.npz": (folder / "d.npz").read_bytes()},
        ),
        "npy": Decoder(lambda at: load(str(at / "d")), folder_of),
        "libsvm": Decoder(lambda at: load(str(at / "d.svm")), {"d.svm": sparse}),
        "texts": Decoder(read_texts, texts),
        "sums": Decoder(again(Sums, "sums.json"), {"sums.json": sums.encode()}),
        "preparation": Decoder(
            again(Preparation, "p.json"), {"p.json": prepared.encode()}
        ),
    }


NORMS = {
    "input_layernorm": "attention",
    "post_attention_layernorm": "feed_forward",
    "self_attn.q_norm": "query",
    "self_attn.k_norm": "key",
}


def of_models(folder: Path) -> dict[str, Decoder]:
    config = {**CONFIG, "tie_word_embeddings": True}
    base: Any = moved(initialize(replace(MADE, tied=True), jr.key(0)))
    arrays = {
        "model.embed_tokens.weight": base.embeddings,
        "model.norm.weight": base.last_norm.weight,
    }
    for n in range(MADE.blocks):
        where = f"model.layers.{n}"
        for name, own in PLACES.items():
            arrays[f"{where}.{own}.weight"] = base.weights[name][n]
        for own, name in NORMS.items():
            arrays[f"{where}.{own}.weight"] = base.norms[name].weight[n]
    whole = save({name: np.asarray(one) for name, one in arrays.items()})
    drawn = draw_adapters(MADE, ("query", "down"), 2, 1.5, jr.key(1))
    kept(moved(drawn), "qwen3", folder / "adapters")
    adapters = {one.name: one.read_bytes() for one in (folder / "adapters").iterdir()}
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": whole}
    first = Parameters(3, 40, 0.013, 3.1, 4.7, 0.29, 0.53, 90)
    base_plan = Calibration(1, 2000, first, 0.23, 9, (4, 6), 0.37)
    plan = practical_plan(base_plan, 4, iterations=500).plain()
    tracked = b"".join(b'{"round": %d, "loss": 1.5}\n' % n for n in range(4))
    return {
        "transformer": Decoder(read_checkpoint, files),
        "adapters": Decoder(lambda at: read_adapters(at, MADE, "qwen3"), adapters),
        "plan": Decoder(
            lambda at: follow_file(at / "plan.json", Experiment("quadratic")),
            {"plan.json": json.dumps(plan).encode()},
        ),
        "tracked": Decoder(
            lambda at: _end_before(at / "t.jsonl", 3), {"t.jsonl": tracked}
        ),
    }


KEPT_NODE = {"nodeId": "5", "ownerAid": "a", "status": "online", "publicKey": "YWI="}
KEPT_NODES = {"format": 1, "nodes": [{**KEPT_NODE, "heartbeatInterval": 30.0}]}


def of_sites(folder: Path) -> dict[str, Decoder]:
    """Return what a site remembers, and its rows."""
    noisy, clear = (site_job(job_with(channel), 0) for channel in (NOISY, PLAIN))
    rows = clear.data
    lower = jax.tree.map(lambda leaf: leaf[:, ::-1] + 1, rows.lower)
    clear = replace(clear, data=replace(rows, lower=lower))
    for job in (noisy, clear):
        SiteLedger(job, SiteLimits(), folder / "state").exchange(2, 3, "f", ["a"])
    state = {one.name: one.read_bytes() for one in (folder / "state").iterdir()}
    old = {"exchanges": 2, "measurements": 1, "measured": {}, "concluded": {}}
    state["client7.ledger.json"] = json.dumps(old).encode()
    del state["ledger.lock"]
    cohorts = Cohorts(2, apart=True, path=folder / "cohorts.jsonl")
    for digest in "ab":
        cohorts.enter(Question("settings", digest), (0, 1, 2))
    counts = ServerReleases(folder / "releases.json")
    for blocks in (1, 2):
        counts.ask(blocks, 3)
    array, packed = np.arange(6.0).reshape(3, 2), gzip.compress(TABLE.encode())
    np.savez(folder / "a.npz", features=array, label=np.arange(3))
    own = {"t.csv": TABLE.encode(), "t.csv.gz": packed, "a.npy": as_npy(array)}

    def released(place: Path) -> None:
        found = ServerReleases(place / "releases.json").counts
        assert privacy_of_releases(noisy, found)["epsilon"] >= 0

    return {
        "ledgers": Decoder(
            lambda at: SiteLedger(noisy, SiteLimits(), at).remark(), state
        ),
        "cohorts": Decoder(
            lambda at: Cohorts(2, apart=True, path=at / "cohorts.jsonl"),
            of_files(folder, "cohorts.jsonl"),
        ),
        "releases": Decoder(released, of_files(folder, "releases.json")),
        "own rows": Decoder(
            lambda at: OwnRows(at.with_name(f"{at.name}s"), rows_of_files(at)),
            own | of_files(folder, "a.npz"),
        ),
        "nodes": Decoder(
            lambda at: _read(at / "nodes.json"),
            {"nodes.json": json.dumps(KEPT_NODES).encode()},
        ),
    }


def of_files(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def of_images(folder: Path) -> dict[str, Decoder]:
    draw = np.random.default_rng(5)
    pixels = draw.integers(0, 256, (4, 5, 5), np.uint8)
    files = {}
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for number, one in enumerate(pixels):
            kind, stream = ("png", "jpeg")[number % 2], io.BytesIO()
            Image.fromarray(one).save(stream, kind)
            name = f"{'ab'[number // 2]}/{number}.{kind}"
            files[name] = stream.getvalue()
            archive.writestr(name, stream.getvalue())
    head = bytes((0, 0, 8, 3)) + struct.pack(">3I", *pixels.shape)
    idx = {"train-images-idx3-ubyte": head + pixels.tobytes()}
    label = bytes((0, 0, 8, 1)) + struct.pack(">I", 4) + bytes((0, 1, 0, 1))
    return {
        "images": Decoder(lambda at: load(str(at)), files),
        "zip": Decoder(lambda at: load(str(at)), of_files(folder, "all.zip")),
        "idx": Decoder(
            lambda at: load(str(at)),
            {**idx, "train-labels-idx1-ubyte.gz": gzip.compress(label)},
        ),
    }


def of_studies(folder: Path) -> dict[str, Decoder]:
    """Return the files of a comparison, of its searches, and of what they are told."""
    experiment = Experiment("quadratic", clients=2, rounds=2)
    run_comparison(experiment, ["fedbio", "fedavg"], 2, folder=folder / "study")
    place = folder / "study"
    compared = {
        str(one.relative_to(place)): one.read_bytes()
        for one in place.rglob("*")
        if one.is_file()
    }
    begun = json.loads(compared["settings.json"])
    asked = {"budget": 3.0, "unit": "samples"}
    search = json.dumps({"trials": 4, **asked}).encode()
    timed = json.dumps({"fedbio": [[1, 2], [0.5, 1.5]]}).encode()
    chances = {"c.csv": b"site,chance\nnorth,0.9\nsouth,0.5\n"}
    chances["c.json"] = json.dumps({"north": 0.9, "south": 0.5}).encode()

    def participation(at: Path) -> None:
        for name in chances:
            read_participation(at / name)

    def trials(at: Path) -> None:
        assert _count_kept(at / "search.json", asked) > 0

    def seconds(at: Path) -> None:
        for ends, found in _timed(at / "timed.json").values():
            assert len(ends) == len(found) and (found >= 0).all()

    return {
        "compared": Decoder(Comparison.load, compared),
        "continued": Decoder(
            lambda at: _check_folder(at, True, begun),
            of(compared, "settings.json"),
        ),
        "search": Decoder(trials, {"search.json": search}),
        "timed": Decoder(seconds, {"timed.json": timed}),
        "participation": Decoder(participation, chances),
    }


PARTS: dict[Callable[[Path], dict[str, Decoder]], list[str]] = {
    of_runs: ["experiment", "result", "report", "unfinished", "checkpoint", "model"],
    of_federations: ["federation", "keys", "masks", "states"],
    of_data: ["csv", "npz", "npy", "libsvm", "texts", "sums", "preparation"],
    of_models: ["transformer", "adapters", "plan", "tracked"],
    of_sites: ["ledgers", "cohorts", "releases", "own rows", "nodes"],
    of_images: ["images", "zip", "idx"],
    of_studies: ["compared", "continued", "search", "timed", "participation"],
}
NAMES = {name: part for part, names in PARTS.items() for name in names}
LATER = (of_sites, of_images, of_studies)
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if part in LATER else [])
    for name, part in NAMES.items()
]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory) -> Callable[[str], Decoder]:
    @functools.cache
    def made(part: Callable[[Path], dict[str, Decoder]]) -> dict[str, Decoder]:
        found = part(tmp_path_factory.mktemp("honest"))
        assert list(found) == PARTS[part]
        for name, one in found.items():
            place = tmp_path_factory.mktemp(name)
            one.write(place)
            one.read(place)  # before it is changed
        return found

    return lambda name: made(NAMES[name])[name]


LINES = Lines(tool=3)
# Some files have thousands of bytes, and a change may draw every one of them.
LARGE = [HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_was_changed_is_read_or_refused(decoders, name, tmp_path):
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.target],  # to shrink takes minutes
        suppress_health_check=[*LARGE, HealthCheck.too_slow],
    )
    @given(draw=st.randoms(use_true_random=False))
    def attack(draw):
        with TemporaryDirectory(dir=tmp_path) as place:
            reached = decoders(name).attack(draw, Path(place), LINES)
        target(float(reached))

    attack()


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 2**62), (3,)])
def test_an_array_that_announces_what_it_has_not_is_refused(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("more.npy", announcing(shape, "<f8") + bytes(16))
    tracemalloc.start()
    with pytest.raises(ValueError, match="more.npy announces [0-9]+ bytes, and has"):
        read_arrays(tmp_path / "a.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LARGEST_COST


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_60_files_that_were_changed(decoders, name, tmp_path):
    draw, one = random.Random(11), decoders(name)
    for _ in range(60):
        with TemporaryDirectory(dir=tmp_path) as place:
            one.attack(draw, Path(place), LINES)
