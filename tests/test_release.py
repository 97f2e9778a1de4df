"""What is released works without the project's folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_and_title_are_cited_as_they_are_released():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["title"].startswith(f"{PROJECT['name']}: ")


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


@pytest.mark.slow
def test_a_wheel_works_without_the_project(built, tmp_path):
    """Libraries come from here, but no folder that this environment links to."""
    _, wheel = built
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    paths = (str(tmp_path / "site"), sysconfig.get_path("purelib"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def call(*arguments: str) -> str:
        whole = [sys.executable, "-S", "-c", "from fedbilevel.cli import main; main()"]
        if arguments[0] == "python":
            whole, arguments = whole[:2], arguments[1:]
        done = subprocess.run(
            [*whole, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import fedbilevel as fb; print(fb.__file__, fb.FedBiO)"
    assert str(tmp_path / "site") in call("python", "-c", where)
    assert "regularization" in call("list", "tasks")
    assert "compare" in call("--help")
    call("run", "quadratic", "--rounds", "2", "--clients", "2", "--out", "here")
    call("report", "here")
    assert (tmp_path / "here" / "report.html").stat().st_size > 10_000
