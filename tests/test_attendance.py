"""Clients that do not always reply: drawn by chances, the same in every runtime."""

import json
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel._types import Pair
from fedbilevel.algorithms import Phase, with_turn
from fedbilevel.channels import Channel, Krum, Privacy
from fedbilevel.cli.app import app
from fedbilevel.errors import HeterogeneityWarning, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.clients import read_participation
from fedbilevel.experiments.run_folder import run_command
from fedbilevel.runtime import (
    DiskSimulatorRuntime,
    Job,
    Ledger,
    ReferenceRuntime,
    Sampling,
    SimulatorRuntime,
    SweepRuntime,
    execute,
    keys,
    sampling,
)
from fedbilevel.runtime.job import ABSENT, PRESENT
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.test_contract import AbstractToy, Seen

pytestmark = pytest.mark.two_devices

BSGVRM = case_of("local-bsgvrm").algorithm
CONTROLS = case_of("fedbio-controls").algorithm
CLIENTS, ROUNDS = 5, 200
SHARES = np.asarray([0.3, 0.5, 0.7, 0.9, 1.0], np.float32)


def with_chances(job: Job, chances=SHARES) -> Job:
    return replace(job, chances=jnp.asarray(chances))


def assert_equal(one, other, tolerance=0.0):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Counting(AbstractToy):
    """The server counts whom it saw and whom it asked, each client its own replies."""

    def init_client(self, x, y):  # pyright: ignore[reportIncompatibleMethodOverride]
        return jnp.zeros(())

    def init_server(self, x, y):
        return Seen(
            Pair(x, y), {"came": jnp.zeros(CLIENTS), "asked": jnp.zeros(CLIENTS)}
        )

    def phases(self):
        def local(sent, client, oracle, turn):
            return client + 1, jnp.ones(())

        def up(server, mean, turn):
            came = server.told["came"].at[turn.ids].add(turn.present.astype(float))
            asked = server.told["asked"].at[turn.ids].add(1)
            return Seen(server.point, {"came": came, "asked": asked})

        return (Phase("count", lambda server: server.point, local, with_turn(up)),)


def within_binomial_bounds(seen, asked, chances):
    """Four standard deviations: once in sixteen thousand by chance."""
    spread = np.sqrt(asked * chances * (1 - chances))
    return (np.abs(seen - asked * chances) <= 4 * spread + 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("participants", [CLIENTS, 3])
def test_clients_reply_as_often_as_their_chances_say(participants):
    data = quadratic_data(CLIENTS)
    job = with_chances(quadratic_job(Counting(), data, participants=participants))
    state = execute(SimulatorRuntime(job), ROUNDS).state
    told = jax.tree.map(np.asarray, state.server.told)
    np.testing.assert_array_equal(state.clients.memory, told["came"])
    assert told["asked"].sum() == ROUNDS * participants
    assert within_binomial_bounds(told["came"], told["asked"], SHARES)
    assert not within_binomial_bounds(told["came"], told["asked"], SHARES[::-1])


@pytest.mark.slow
def test_somebody_always_replies_and_draws_repeat_by_seed():
    rare = np.full(CLIENTS, 0.01, np.float32)
    found = []
    for seed in (0, 0, 1):
        plain = quadratic_job(Counting(), quadratic_data(CLIENTS), seed=seed)
        job = with_chances(plain, rare)
        found.append(execute(SimulatorRuntime(job), 40).state.server.told["came"])
        # Costs are those of who replied, and of no other.
        costs, whole = (Ledger(one).summary(one.key, 40) for one in (job, plain))
        each = whole["bytes_up"] / (40 * CLIENTS)
        assert costs["bytes_up"] == each * found[-1].sum()
        assert costs["exchanges"] == 40
        assert 40 <= found[-1].sum() <= 46
    np.testing.assert_array_equal(found[0], found[1])
    together = execute(SweepRuntime(job, seeds=(0, 1)), 40).state.state.server
    np.testing.assert_array_equal(together.told["came"], found[1:])
    assert (found[0] != found[2]).any()


def test_replies_are_counted_by_one_program_and_once_per_seed(monkeypatch):
    traced, ran = [], []

    def noting(calls, function):
        return lambda *given: calls.append(given) or function(*given)

    monkeypatch.setattr(keys, "draw_replies", noting(traced, keys.draw_replies))
    plain = quadratic_job(Counting(), quadratic_data(CLIENTS), participants=3)
    job, other = with_chances(plain), jax.random.key(7)
    found = [Ledger(job).cumulative(key, 1500) for key in (job.key, other)]
    assert len(traced) <= 1  # neither per thousand turns, nor per seed or ledger
    drawn = sampling._replies_of_turns
    monkeypatch.setattr(sampling, "_replies_of_turns", noting(ran, drawn))
    ledger = Ledger(job)
    for key, before in zip((job.key, other), found, strict=True):
        assert_equal(ledger.cumulative(key, 1500), before)
        counts = ledger.summary(key, 1500)
        assert counts["bytes_up"] + counts["bytes_down"] == before["bytes"][-1]
    assert len(ran) == 4  # two thousand turns of two seeds
    assert (found[0]["bytes"] != found[1]["bytes"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [BSGVRM, CONTROLS])
def test_all_chances_one_are_full_participation(algorithm):
    plain = quadratic_job(algorithm, quadratic_data(CLIENTS))
    drawn = with_chances(plain, np.ones(CLIENTS, np.float32))
    here, there = (execute(SimulatorRuntime(one), 3) for one in (plain, drawn))
    assert_equal(here.state, there.state)
    assert_equal(here.columns, there.columns)


def test_chances_of_one_are_the_job_of_before():
    data = quadratic_data(CLIENTS)
    for given in (None, 1, [1.0] * CLIENTS):
        assert Sampling(1, participation=given).chances(data) is None
    chances = Sampling(1, participation=0.5).chances(data)
    np.testing.assert_array_equal(chances, np.full(CLIENTS, 0.5, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [BSGVRM, CONTROLS])
@pytest.mark.parametrize("participants", [CLIENTS, 3])
def test_the_simulator_is_the_reference(algorithm, participants, monkeypatch, tmp_path):
    data = quadratic_data(CLIENTS)
    job = with_chances(quadratic_job(algorithm, data, participants=participants))
    fast, slow = (execute(one(job), 3) for one in (SimulatorRuntime, ReferenceRuntime))
    assert_equal(fast.state, slow.state, 1e-12)
    assert_equal(fast.columns, slow.columns, 1e-12)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert_equal(execute(SimulatorRuntime(job), 3).state, slow.state, 1e-12)
    if participants < CLIENTS:
        stored = execute(DiskSimulatorRuntime(job, folder=tmp_path), 3)
        assert_equal(stored.state, slow.state, 1e-12)


@pytest.mark.slow
def test_what_is_drawn_is_a_record_that_is_replayed():
    job = with_chances(quadratic_job(BSGVRM, quadratic_data(CLIENTS)))
    everybody, chances = jnp.arange(CLIENTS), jnp.asarray(SHARES)
    came = [
        keys.draw_replies(job.key, stage, 0, turn, chances, everybody)
        for stage, turn in ((keys.SETUP, 0), *((keys.ROUNDS, t) for t in range(4)))
    ]
    assert not np.all(came)
    record = np.where(np.asarray(came), PRESENT, ABSENT).astype(np.uint8)
    replayed = execute(SimulatorRuntime(job.replaying(record)), 4).state
    drawn = execute(SimulatorRuntime(job), 4).state
    assert_equal(drawn.server, replayed.server, 1e-12)
    assert_equal(drawn.clients, replayed.clients, 1e-12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0.5, 0.5], "participation has 2 chances for 5 clients"),
        (0.0, "above 0 and at most 1, got 0 to 0"),
        ([0.5] * 4 + [1.5], "got 0.5 to 1.5"),
        (float("nan"), "above 0 and at most 1"),
    ],
)
def test_chances_that_cannot_be_are_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        Sampling(1, participation=given).chances(quadratic_data(CLIENTS))


def test_what_needs_many_replies_is_refused():
    def made(channel):
        plain = quadratic_job(BSGVRM, quadratic_data(CLIENTS))
        start = (plain.algorithm, plain.problem, plain.data, plain.x, plain.y)
        sampling = Sampling(1, participation=0.5)
        return Job.of(*start, sampling=sampling, channel=channel)

    assert made(Channel()).chances is not None
    with pytest.raises(InvalidInputError, match="no share of the noise"):
        made(Channel((Privacy(1.0, 2.0),)))
    with pytest.raises(InvalidInputError, match="there are 1. Use more participants"):
        made(Channel((), Krum(1)))
    with pytest.raises(InvalidInputError, match="whose rows are its own"):
        Sampling(1, participation=0.5).chances(quadratic_data(2).pooled())


IN_FILES = {
    "chances.csv": "site,chance\nnorth,0.5\n\nsouth,1\n",
    "row.csv": "0.5, 1\n",
    "bare.csv": "0.5\n1\n",
    "names.json": '{"north": 0.5, "south": 1}',
    "list.json": "[0.5, 1]",
}


@pytest.mark.parametrize("name", list(IN_FILES))
def test_chances_are_read_from_files(name, tmp_path):
    (tmp_path / name).write_text(IN_FILES[name])
    found = read_participation(str(tmp_path / name))
    named = "north" in IN_FILES[name]
    assert found == ("north=0.5,south=1" if named else "0.5,1")
    # What a folder keeps does not need the file.
    assert read_participation(found) == found
    assert Experiment("quadratic", participation=found).participation == found


def test_a_file_without_chances_is_refused(tmp_path):
    (tmp_path / "none.json").write_text("null")
    with pytest.raises(InvalidInputError, match=r"none\.json holds no chances"):
        read_participation(tmp_path / "none.json")


@pytest.mark.filterwarnings("ignore:clients reply with")
def test_chances_are_given_in_python_and_joined_with_dropout():
    with pytest.raises(InvalidInputError, match=r"'a\\rb' is no list of names"):
        read_participation("a\rb")
    assert read_participation(None) is None
    assert read_participation(0.5) == read_participation("0.5") == "0.5"
    many = read_participation([0.25] * 200)  # longer than a name of a file may be
    assert many == read_participation(many) == ",".join(["0.25"] * 200)
    assert read_participation({"a, b": np.float32(0.5)}) == '"a, b=0.5"'
    experiment = Experiment("quadratic", clients=3, rounds=2)
    assert experiment.build().job().chances is None
    whole = replace(experiment, dropout=0.0, participation="1,1,1")
    assert whole.build().job().chances is None
    for given, dropout, chances in [
        ((0.5, 1, 0.8), 0.5, [0.25, 0.5, 0.4]),
        ((0.5,), 0.0, [0.5] * 3),
        (None, 0.1, [0.9] * 3),
    ]:
        drawn = replace(experiment, dropout=dropout, participation=given)
        found: Any = drawn.build().job().chances
        np.testing.assert_allclose(found, chances, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"participation": "no-such.csv"}, "there is no such file. Give a CSV or JSON"),
        ({"participation": "0.5,0.5"}, "2 chances for 3 clients"),
        ({"participation": "north=0.5"}, "unknown site in --participation 'north'"),
        ({"dropout": 1.0}, "--dropout 1: must be at least 0 and below 1"),
        ({"dropout": 0.1, "aggregate": "krum:1"}, "there are 1. Use more"),
    ],
)
def test_what_cannot_be_simulated_is_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        Experiment("quadratic", clients=3, rounds=1, **given).build().job()


def test_sites_have_chances_by_their_names(tmp_path):
    sites = ("north", '"so,uth"')
    rows = [f"{site},{k % 3},{k % 2}" for k in range(12) for site in sites]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["site,a,label", *rows]) + "\n")
    options = {"data": str(table), "site": "site"}
    chances = {"so,uth": 0.25, "north": 0.75}
    experiment = Experiment("regularization", participation=chances, options=options)
    with pytest.warns(HeterogeneityWarning, match="reply with chances of 0.25 to 0.75"):
        job = experiment.build().job()
    held: Any = job.chances
    np.testing.assert_allclose(held, [0.75, 0.25])
    with pytest.raises(InvalidInputError, match="1 of 2 sites a chance by name"):
        replace(experiment, participation={"north": 0.5}).build()


@pytest.mark.filterwarnings("ignore:clients reply with")
def test_a_run_with_dropout_says_so_and_is_repeated(tmp_path):
    (tmp_path / "p.csv").write_text("0.5\n0.75\n1\n")
    words = ["run", "quadratic", "--clients", "3", "--rounds", "4", "--json"]
    words += ["--dropout", "0.2", "--participation", str(tmp_path / "p.csv")]
    ran = []
    for name in ("one", "other"):
        call = [*words, "--out", str(tmp_path / name)]
        done = CliRunner().invoke(app, call)
        assert done.exit_code == 0, done.stderr
        ran.append(json.loads(done.stdout))
        words[-1] = "0.5,0.75,1"
    assert ran[0]["final"] == ran[1]["final"] and ran[0]["counts"] == ran[1]["counts"]
    assert ran[0]["config"]["participation"] == [0.4, 0.8]
    held = Experiment.load(tmp_path / "one")
    assert (held.dropout, held.participation) == (0.2, "0.5,0.75,1")
    assert "--dropout 0.2 --participation 0.5,0.75,1" in run_command(
        asdict(held), "simulator"
    )
    page = CliRunner().invoke(app, ["report", str(tmp_path / "one")])
    assert page.exit_code == 0, page.stderr
    text = " ".join((tmp_path / "one" / "report.html").read_text().split())
    assert "all of them asked in every exchange" in text
    assert "replied with a chance of 0.4 to 0.8" in text
