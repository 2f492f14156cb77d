"""The distribution: what a wheel holds, that it runs alone, and modules whose names are taken."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence

import pytest

from impala.runtime import installation

ROOT = pathlib.Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", *installation.MODULES)
STEM = f"{installation.DISTRIBUTION.replace('-', '_')}-{installation.VERSION}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the source distribution, and the wheel that was built from what it holds."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").touch()  # setuptools takes tests along by itself
    _build("build_sdist", source, folder)
    with tarfile.open(folder / f"{STEM}.tar.gz") as archive:
        archive.extractall(folder / "sdist")  # its own files: Python before 3.11.4 has no filter
    _build("build_wheel", folder / "sdist" / STEM, folder)
    return folder


def _build(function: str, source: pathlib.Path, destination: pathlib.Path) -> None:
    script = f"from setuptools import build_meta; build_meta.{function}({str(destination)!r})"
    command = [sys.executable, "-c", script]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


@pytest.fixture
def unpacked(built: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """What `pip install` makes of the wheel."""
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "site")
    return tmp_path / "site"


def _impala(
    *arguments: str, path: Sequence[pathlib.Path], folder: pathlib.Path
) -> "subprocess.CompletedProcess[str]":
    """Runs `impala` in a folder, with a path for modules before that of this Python."""
    return subprocess.run(
        [sys.executable, "-m", "impala", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
    )


def test_both_distributions_hold_the_program_and_nothing_else(built: pathlib.Path) -> None:
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as wheel:
        in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = email.message_from_bytes(wheel.read(f"{STEM}.dist-info/METADATA"))
        commands = wheel.read(f"{STEM}.dist-info/entry_points.txt").decode()
    program = {
        str(path.relative_to(ROOT))
        for module in installation.MODULES
        for path in (ROOT / module).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert in_wheel == program
    assert {f"{name}/py.typed" for name in installation.MODULES} <= program
    assert "protos/impala/v1/learner.proto" in program
    assert metadata["Name"] == installation.DISTRIBUTION
    assert metadata["Version"] == installation.VERSION
    assert "impala = impala.__main__:main" in commands

    with tarfile.open(built / f"{STEM}.tar.gz") as archive:
        in_source = {
            str(pathlib.Path(member.name).relative_to(STEM))
            for member in archive.getmembers()
            if member.isfile() and ".egg-info/" not in member.name
        }
    others = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "PKG-INFO", "setup.cfg"}
    assert in_source == program | others


def test_a_wheel_runs_without_the_repository(
    unpacked: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    presets = _impala("presets", path=[unpacked], folder=empty)
    assert (presets.returncode, presets.stderr) == (0, "")
    assert "catch" in presets.stdout
    script = "from protos import codec; print(codec.__file__)"
    where = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert where.stdout.strip() == str(unpacked / "protos" / "codec.py"), where.stderr


def _is_refused(answer: "subprocess.CompletedProcess[str]", *words: object) -> None:
    """The answer is one line, with these words, and status 2."""
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("impala: ")
    assert answer.stderr.count("\n") == 1
    for word in words:
        assert str(word) in answer.stderr


def test_shadowing_files_are_named_or_not_imported(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "actors.py").write_text("class Actor: ...\n")
    answer = _impala("presets", path=[tmp_path, ROOT], folder=ROOT)
    _is_refused(answer, tmp_path / "actors.py", "rename the file")
    answer = _impala("presets", path=[ROOT], folder=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.slow
def test_a_wheel_trains_in_an_environment_of_its_own(
    built: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """What it depends on is lent by the environment of the tests, to need no network."""
    venv.create(tmp_path / "venv", with_pip=False)
    scripts, site = (
        pathlib.Path(sysconfig.get_path(kind, "venv", {"base": str(tmp_path / "venv")}))
        for kind in ("scripts", "purelib")
    )
    (site / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet"),
            *("--no-deps", "--no-index", built / f"{STEM}-py3-none-any.whl"),
        ],
        check=True,
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in (("presets",), ("train", "catch", "--total-frames", "2000")):
        done = subprocess.run(
            [scripts / "impala", *arguments],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert [*empty.rglob("metrics.jsonl")]
