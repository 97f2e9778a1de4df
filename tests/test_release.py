"""What is released works without the project's folder."""

import email
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import fedbilevel
from tests.test_doc_blocks import python_of
from tests.test_docs import EXAMPLE, check_example

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
EXTRAS = "optional-dependencies"


def test_version_and_title_are_cited_as_they_are_released():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"] == fedbilevel.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["title"].startswith(f"{PROJECT['name']}: ")
    released = f"{cited['version']} ({cited['date-released']})"
    changes = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", changes, flags=re.M)
    assert [one for one in headings if one != "Unreleased"][0] == released


def test_extras_that_texts_name_exist():
    """An error says what to install, such as `fedbilevel[cli,data]`; that exists."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts += (ROOT / "src").rglob("*.py")
    named = [
        (path.name, extra.strip())
        for path in texts
        for some in re.findall(r"fedbilevel\[([a-z, ]+)\]", path.read_text())
        for extra in some.split(",")
    ]
    assert [one for one in named if one[1] not in PROJECT[EXTRAS]] == []
    assert {"cli", "data", "flower", "privacy", "tune"} <= {extra for _, extra in named}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source archive, and a wheel that was built of its content alone."""
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder, "build_sdist")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (source,) = (one for one in folder.iterdir() if one.is_dir())
    build(source, folder, "build_wheel")
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


def build(source: Path, folder: Path, how: str) -> None:
    program = f"from hatchling import build; build.{how}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True)


def test_a_source_archive_holds_what_was_meant_to_be_in_it(built):
    archive, _ = built
    with tarfile.open(archive) as file:
        names = {Path(*Path(name).parts[1:]) for name in file.getnames()}
    assert {name.parts[0] for name in names} == {
        *("src", "examples", "CHANGELOG.md", "CITATION.cff"),
        *("README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"),
    }
    assert archive.stat().st_size < 2_000_000


def test_a_wheel_holds_every_file_of_the_package(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as file:
        inside = {n for n in file.namelist() if n.startswith("fedbilevel/")}
    source = ROOT / "src"
    there = (one for one in source.rglob("*") if one.is_file())
    named = {one.relative_to(source).as_posix() for one in there}
    assert inside == {one for one in named if "__pycache__" not in one}
    assert {"fedbilevel/py.typed", "fedbilevel/__init__.pyi"} <= inside


def installed(package: Path, folder: Path) -> Path:
    """Install an archive as pip does, into an environment that holds nothing else.

    Libraries, and what a source archive is built by, come from here: no test has a
    network. Links to this project's folder do not work from there.
    """
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*pip, *alone, str(package)], check=True)
    return python.parent


class Reader:
    """Types what texts show, in a folder and an environment of its own."""

    def __init__(self, package: Path, folder: Path):
        self.folder = folder
        self.programs = installed(package, folder / "environment")

    def __call__(self, program: str, *arguments: str) -> str:
        """Return what is printed, in one line; no program may warn or fail."""
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0 and "Warning" not in done.stdout, done.stdout
        return " ".join(re.sub("[│┃]", " ", done.stdout).split())

    def looks_around(self) -> None:
        where = self("python", "-c", "import fedbilevel as fb; print(fb.__file__)")
        assert str(self.folder / "environment") in where
        assert self("fedbilevel", "--version") == f"fedbilevel {PROJECT['version']}"
        assert "compare" in self("fedbilevel", "--help")
        assert "regularization" in self("fedbilevel", "list", "tasks")

    def means(self, folder: str) -> dict[str, float]:
        """Return every method's mean of what a comparison ranks by."""
        about = json.loads((self.folder / folder / "comparison.json").read_text())
        return {one["algorithm"]: one["mean"] for one in about["ranking"]}


@pytest.mark.slow
def test_a_source_archive_works_without_the_project(built, tmp_path):
    Reader(built[0], tmp_path).looks_around()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_wheel_passes_the_readme_and_the_start_from_top_to_bottom(built, tmp_path):
    call = Reader(built[1], tmp_path)
    call.looks_around()
    check_example(call("python", "-c", EXAMPLE))
    (table,) = python_of("start.md")
    call("python", "-c", table)
    start = (ROOT / "docs" / "start.md").read_text()
    lines = re.findall(r"^ {4}(fedbilevel .*)$", README + start, flags=re.M)
    said = {line: call(*shlex.split(line)) for line in dict.fromkeys(lines)}
    check_weights(said[lines[0]])
    printed = " ".join(said.values())
    # Another version of JAX may change a last digit of what the README quotes.
    quoted = " ".join(re.findall(r"^> (.*)$", README, flags=re.M))
    assert re.sub(r"\d", "", quoted) in re.sub(r"\d", "", printed)
    understood = start.split("understood.")[1].split("Then it trains")[0]
    for line in re.findall(r"^ {4}(.*)$", understood, flags=re.M):
        assert line in printed
    predicted = (tmp_path / "predictions.csv").read_text().splitlines()
    assert len(predicted) == 21 and f"    {predicted[0]}\n" in start
    for folder in ("cleaned", "ill"):
        assert (tmp_path / "runs" / folder / "report.html").stat().st_size > 10_000
    found = call.means("runs/compared")
    assert found["fedbio"] < 0.5 * found["fedavg"]
    found = call.means("runs/comparison")
    (near,) = re.findall(r"near ([\d.]+) tuned and ([\d.]+) untuned", start)
    assert found["newton-bfgs"] == pytest.approx(float(near[0]), abs=0.003)
    assert found["fedavg"] == pytest.approx(float(near[1]), abs=0.003)


def check_weights(printed: str) -> None:
    """Look whether a run weighs wrong labels as the README says below it."""
    text = r"mean weight of ([\d.]+), wrong ones with ([\d.]+)\."
    (promised,) = re.findall(text, " ".join(README.split()))
    found = re.findall(r"weight_(?:clean|corrupted) ([\d.]+)", printed)
    assert [float(one) for one in found] == pytest.approx(
        [float(one) for one in promised], abs=0.05
    )


def test_metadata_name_the_readme_and_the_license(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as file:
        (place,) = (one for one in file.namelist() if one.endswith("/METADATA"))
        about = email.message_from_string(file.read(place).decode())
        assert any(one.endswith("licenses/LICENSE") for one in file.namelist())
    assert about["Version"] == PROJECT["version"]
    assert set(about.get_all("Provides-Extra") or ()) == set(PROJECT[EXTRAS])
    assert str(about.get_payload()).strip() == README.strip()
    # What the core needs is what the README says.
    needed = {one for one in about.get_all("Requires-Dist") or () if ";" not in one}
    names = {re.split(r"[<>=]", one)[0] for one in needed}
    assert names == {"equinox", "jax", "jaxtyping", "numpy"}
    assert "The core needs jax, equinox, jaxtyping and numpy only." in README
