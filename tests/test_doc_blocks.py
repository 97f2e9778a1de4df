"""Blocks of the documentation: commands can be typed, programs run, errors come."""

import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import jax.numpy as jnp
import optax
import pytest
import typer.main
from typer.testing import CliRunner

import fedbilevel
from fedbilevel import algorithms, tasks
from fedbilevel.cli.app import app
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.options import options_of
from fedbilevel.tasks._base import options_of as task_options

ROOT = Path(__file__).parent.parent
COMMANDS: dict[str, click.Command] = getattr(
    typer.main.get_command(app), "commands", {}
)
# Texts of the repository; what `errors.md` shows is wrong on purpose, and run below.
TEXTS = {
    path.name if path.parent.name == "docs" else str(path.relative_to(ROOT)): path
    for path in [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        ROOT / "benchmarks" / "README.md",
    ]
}
# Algorithms that whoever reads a guide writes, or that a table names.
OF_READERS = {"NAME", "local-bsg", "METHOD"}
# Files with blocks of Python, and the tests that run them.
RUN_BY = {
    "README.md": "test_docs",
    "add-an-algorithm.md": "test_docs",
    "clean-labels.md": "test_wrong_labels_are_found_as_the_tutorial_says",
    "errors.md": "home",
    "from-pytorch.md": "test_pytorch",
    "hypergradients.md": "test_direct_hypergradient",
    "mesh.md": "test_what_hosts_call_takes_these_arguments",
    "one-machine.md": "test_minimize",
    "own-tasks.md": "test_own_tasks",
    "scikit-learn.md": "test_sklearn",
    "start.md": "home",
    "tuning.md": "test_tuning",
}


def python_of(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXTS[name].read_text(), flags=re.DOTALL)


def made_pages() -> dict[str, str]:
    place = ROOT / "docs" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.every_page())


def typed(text: str) -> Iterator[str]:
    """Yield what is shown to be typed: indented lines, and words between backquotes."""
    text = text.replace("\\\n", " ").replace("--seed SEED", "--seed 0")
    yield from re.findall(r"^ {4}fedbilevel ([a-z].*)$", text, flags=re.M)
    for words in re.findall(r"`fedbilevel ([^`|]*)`", text):
        if " " in words:
            # In a sentence a command may be cut short.
            yield f"{' '.join(words.split())} ..."


def given(line: str) -> tuple[str, dict[str, Any]]:
    """Return the command of a line and what it was given, by the real parser."""
    name, *words = shlex.split(line, comments=True)
    whole = [word for word in words if word != "..."]
    try:
        context = COMMANDS[name].make_context(name, list(whole))
    except (click.MissingParameter, click.BadOptionUsage):
        assert "..." in words, line  # it says itself that something is left out
        return name, {}
    return name, context.params


def check_names(values: dict[str, Any], line: str) -> None:
    """Look whether the task, the algorithms and the options named exist."""
    task = values.get("task") or ""
    if not task or ":" in task or task.isupper():
        return
    assert task in tasks.names(), line
    named = values.get("algorithms") or values.get("algorithm") or ""
    chosen = [one for one in named.split(",") if one and one not in OF_READERS]
    assert all(":" in one or one in algorithms.names() for one in chosen), line
    known = set(task_options(tasks.find(task)))
    for one in chosen or algorithms.names():
        known |= set(options_of(algorithms.find(one)))
    for pair in values.get("settings") or ():
        assert pair.partition("=")[0].rpartition(".")[2] in known, line


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"errors.md"}))
def test_every_command_of_a_text_can_be_typed(name):
    for line in typed(TEXTS[name].read_text()):
        check_names(given(line)[1], line)


@pytest.mark.slow
def test_every_command_of_a_made_page_can_be_typed():
    pages = made_pages()
    lines = [line for text in pages.values() for line in typed(text)]
    for line in dict.fromkeys(lines):
        check_names(given(line)[1], line)
    assert len(lines) > 100


def test_what_cannot_be_typed_is_seen():
    with pytest.raises(click.NoSuchOption):
        given("run quadratic --client 3")
    with pytest.raises(KeyError):
        given("tunes quadratic")
    for wrong in ("run quadratics", "run quadratic --set nose=1"):
        with pytest.raises(AssertionError):
            check_names(given(wrong)[1], wrong)


def test_every_block_of_python_is_run_by_a_test():
    assert {name for name in TEXTS if python_of(name)} == set(RUN_BY)


def test_every_option_is_explained_in_the_glossary():
    pages = made_pages()
    for name in tasks.names():
        for option, (_, meaning) in task_options(tasks.find(name)).items():
            told = " ".join(meaning.split()).replace("|", "\\|")
            assert told, f"{name}: {option}"
            for page in ("options.md", f"tasks/{name}.md"):
                rows = re.findall(rf"^\| `{option}` .*$", pages[page], flags=re.M)
                assert any(told in row for row in rows), (page, option)


def test_the_readme_has_three_commands_of_the_start():
    shown = set(typed(TEXTS["start.md"].read_text()))
    _, short = TEXTS["README.md"].read_text().split("## From a table to predictions")
    short = short.split("\n## ")[0]
    assert len(list(typed(short))) == 3 and set(typed(short)) <= shown


def grade(text: str) -> float:
    """Return the Flesch-Kincaid grade of the prose in a text: years of school."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = re.sub(r"^(?: {4}|\||#|!).*$", "", prose, flags=re.M)
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "name", prose))
    prose = re.sub(r"^- |\n\s*\n", ". ", prose, flags=re.M)
    sentences = [one for one in re.split(r"[.!?]\s", prose) if re.search(r"[a-z]", one)]
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", prose)
    sounds = [
        len(re.findall(r"[aeiouy]+", re.sub(r"e$", "", one, flags=re.I), re.I))
        for one in words
    ]
    syllables = sum(max(one, 1) for one in sounds)
    return 0.39 * len(words) / len(sentences) + 11.8 * syllables / len(words) - 15.59


@pytest.mark.parametrize("name", ["README.md", "start.md"])
def test_the_first_pages_are_easy_to_read(name):
    assert grade(TEXTS[name].read_text()) <= 10


def test_long_sentences_are_noticed():
    easy, hard = (
        "We ran it. It was fast.",
        "Notwithstanding considerable heterogeneity, ",
    )
    assert grade(easy) < 5 < 10 < grade(hard * 5 + "convergence materializes.")


@pytest.mark.parametrize(("name", "most"), [("README.md", 900), ("results.md", 3000)])
def test_a_page_is_short(name, most):
    assert len(TEXTS[name].read_text().split()) <= most


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder as a reader of the guide has it after the first run."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in (*python_of("start.md"), *python_of("errors.md")):
            exec(code, {})
        options = {"data": "patients.csv", "label": "ill", "site": "hospital"}
        options["missing"] = "mean"
        # A model of one round will do; what is kept of its settings is the guide's.
        own = Experiment("regularization", "fedavg", rounds=1, options=options)
        own.run(Path("runs/ill"))
        Experiment("regularization", options=options).save(Path("runs/ill"))
    return folder


def typed_here(words: str, folder: Path, monkeypatch) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, shlex.split(words))
    return done.exit_code, " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


def quoted_errors() -> list[Any]:
    text = TEXTS["errors.md"].read_text()
    found = re.findall(r"^ {4}fedbilevel (.*)\n\n> (.*)$", text, flags=re.M)
    diverges = "run two-client --algorithm fedbio --set lower_step=100"
    return [
        pytest.param(*one, marks=pytest.mark.slow if diverges in one[0] else ())
        for one in found
    ]


@pytest.mark.parametrize(("words", "sentence"), quoted_errors())
def test_an_error_is_told_as_the_guide_quotes_it(home, monkeypatch, words, sentence):
    status, told = typed_here(words, home, monkeypatch)
    assert status == 2
    place = 0
    for part in sentence.split("..."):  # what is left out of a long list
        at = told.find(part.strip(), place)
        assert at >= 0, told
        place = at + len(part.strip())


def test_every_command_of_the_guide_to_errors_has_its_sentence():
    lines = re.findall(r"^ {4}fedbilevel ", TEXTS["errors.md"].read_text(), flags=re.M)
    assert len(lines) == len(quoted_errors()) >= 15


def test_a_loss_with_a_model_of_flax_is_a_loss():
    _, code, *_ = python_of("own-tasks.md")
    network = SimpleNamespace(apply=lambda all, image: image @ all["params"]["w"])
    names: dict[str, Any] = {"network": network, "optax": optax}
    exec(code, names)
    rows = {"image": jnp.eye(2), "label": jnp.asarray([0, 1])}
    # Scores of 0 for two classes: log 2.
    loss = names["lower"]({}, {"w": jnp.zeros((2, 2))}, rows)
    assert float(loss) == pytest.approx(0.6931471805599453)


@pytest.mark.slow
def test_clients_drop_out_as_the_guide_says():
    *_, code = python_of("own-tasks.md")
    names: dict[str, Any] = {}
    exec(code, names)
    came, state = names["came"], names["outcome"].state
    assert not came[:, :-1].all(axis=0).any() and state is not None
    # The answer is that of all clients, and is reached though most are absent at times.
    columns = names["outcome"].columns["grad_norm_sq"]
    assert columns[-1] < 0.1 * columns[0]


def test_what_hosts_call_takes_these_arguments(monkeypatch):
    (code,) = python_of("mesh.md")
    called = []

    def checked(name: str):
        signature = inspect.signature(getattr(fedbilevel, name))

        def call(*values: Any, **named: Any) -> None:
            called.append((name, signature.bind(*values, **named)))

        return call

    for name in ("configure", "join", "run"):
        monkeypatch.setattr(fedbilevel, name, checked(name))
    exec(code, dict.fromkeys(("problem", "data", "start", "algorithm")))
    assert [name for name, _ in called] == ["configure", "join", "run"]


@pytest.mark.slow
def test_wrong_labels_are_found_as_the_tutorial_says(tmp_path, monkeypatch, capsys):
    make, count = python_of("clean-labels.md")
    monkeypatch.chdir(tmp_path)
    exec(make, {})
    (line,) = re.findall(
        r"^ {4}fedbilevel (.*)$", TEXTS["clean-labels.md"].read_text(), flags=re.M
    )
    status, said = typed_here(line, tmp_path, monkeypatch)
    assert status == 0, said
    capsys.readouterr()
    exec(count, {})
    # The guide says 95 %; other versions of JAX may draw another sample.
    assert int(capsys.readouterr().out.split("%")[0]) >= 90
