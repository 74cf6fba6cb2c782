"""The wheel and the editable install give the same package, and outside of `ckptkit` only what the
command begins with.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"ckptkit": "ckptkit", "cli": "ckptkit/cli", "schemas": "ckptkit/schemas"}
PROBE = """
import importlib.util, json
import ckptkit, ckptkit.cli, ckptkit.schemas
from importlib.resources import files
print(json.dumps({
    "version": ckptkit.__version__,
    "outside": [name for name in ("cli", "schemas") if importlib.util.find_spec(name)],
    "typed": files("ckptkit").joinpath("py.typed").is_file(),
    "format": files("ckptkit.schemas").joinpath("FORMAT.md").is_file(),
}))
"""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.args}\n{done.stdout}{done.stderr}"
    return done.stdout


def _copy(folder: Path) -> Path:
    """A clean source tree: building in the checkout would reuse and leave build products there."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "ckptkit_command.py"):
        shutil.copy(ROOT / name, folder)
    return folder


def _environment(folder: Path) -> Path:
    """The interpreter of an empty environment that sees our dependencies but not our ckptkit.

    A folder named in a .pth file is searched, but its own .pth files, which is where an editable
    install hooks in, are not read; a ckptkit installed into the environment itself comes first.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def _install(python: Path, *what: str | Path) -> None:
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    pip = (sys.executable, "-m", "pip", "--python", python)
    _run(*pip, "install", *options, *what, cwd=python.parents[1])


def _check(python: Path) -> None:
    elsewhere = python.parents[1]
    found = json.loads(_run(python, "-c", PROBE, cwd=elsewhere))
    version = found.pop("version")
    assert found == {"outside": [], "typed": True, "format": True}
    assert version in _run(python.with_name("ckpt"), "--version", cwd=elsewhere)
    assert "Usage: ckpt" in _run(python.with_name("ckpt"), "--help", cwd=elsewhere)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = _copy(tmp_path_factory.mktemp("source"))
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    _run(*pip, "--wheel-dir", folder, source, cwd=folder)
    (built,) = folder.glob("ckptkit-*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{inside}/{path.relative_to(ROOT / name).as_posix()}"
        for name, inside in FOLDERS.items()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected.add("ckptkit_command.py")  # which Ctrl-C may meet before the package is there
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected, "packages and package-data in pyproject.toml say what is installed"


def test_an_installed_wheel_works_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "venv")
    _install(python, wheel)
    _check(python)


def test_an_editable_install_works_and_sees_new_modules(tmp_path: Path) -> None:
    source = _copy(tmp_path)
    python = _environment(tmp_path / "venv")
    _install(python, "--editable", source)
    _check(python)
    (source / "cli" / "added.py").write_text("")
    _run(python, "-c", "import ckptkit.cli.added", cwd=python.parents[1])
