"""What is released works without the project's folder."""

import email
import os
import re
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["source", "wheel"])
def test_what_is_released_works_without_the_project(built, kind, tmp_path):
    programs = installed(built[kind], tmp_path / "environment")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def call(name: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(programs / name), *arguments],
            cwd=tmp_path,
            env=inherited,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import fedbilevel as fb; print(fb.__file__, fb.FedBiO)"
    assert str(tmp_path / "environment") in call("python", "-c", where)
    assert call("fedbilevel", "--version") == f"fedbilevel {PROJECT['version']}\n"
    assert "compare" in call("fedbilevel", "--help")
    assert "regularization" in call("fedbilevel", "list", "tasks")
    if kind == 1:
        (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
        call("python", "-c", code)
        small = ("--rounds", "2", "--clients", "2", "--out", "here")
        call("fedbilevel", "run", "quadratic", *small)
        call("fedbilevel", "report", "here")
        assert (tmp_path / "here" / "report.html").stat().st_size > 10_000


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
