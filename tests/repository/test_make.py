"""The commands as a new user types them, on an empty package that needs no network: the set-up
heals itself and runs its own code.
"""

import os
import shutil
import subprocess
import sys

import batches
import pytest

# what pip asks of a project: an editable install is one .pth file
BACKEND = """
import pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name, info = "cats-0.1.0-py3-none-any.whl", "cats-0.1.0.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("cats.pth", str(pathlib.Path.cwd()))
        lines = "Metadata-Version: 2.1", "Name: cats", "Version: 0.1.0", "Provides-Extra: test"
        wheel.writestr(f"{info}/METADATA", "\\n".join(lines))
        lines = "Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any"
        wheel.writestr(f"{info}/WHEEL", "\\n".join(lines))
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "cats"
version = "0.1.0"
"""


def make(folder, *arguments):
    """make in a folder, as from a fresh shell and without a network."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "PYTHON", "PIP", "VIRTUAL"))
    }
    command = ["make", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def code_of(folder):
    """Where the environment of a folder finds the package, and what its commands are run by."""
    ask = "import cats, sys; print(cats.__file__, sys.prefix)"
    return subprocess.run(
        [folder / ".venv/bin/python", "-I", "-c", ask], capture_output=True, text=True
    ).stdout.split()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone whose first set-up was killed before pip was there."""
    folder = tmp_path_factory.mktemp("make") / "first"
    folder.mkdir()
    batches.copy(folder, "Makefile")
    (folder / "cats").mkdir()
    (folder / "cats/__init__.py").touch()
    (folder / "constraints.txt").touch()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (folder / ".venv/bin/activate").unlink()
    done = make(folder, "install")
    assert not done.returncode, done.stdout + done.stderr
    return folder


def test_a_set_up_that_was_killed_is_begun_again(clone):
    assert code_of(clone) == [str(clone / "cats/__init__.py"), str(clone / ".venv")]
    assert make(clone, "--question", "install").returncode == 0  # done once, done
    stamp, half = clone / ".venv/.installed", clone / ".venv/.installing"
    stamp.rename(
        half
    )  # as pip leaves it when it is killed: some packages are there, some are half there
    assert (
        "venv --clear" in make(clone, "--dry-run", "install").stdout
        and make(clone, "--question", "install").returncode == 1
    )
    half.rename(stamp)


def test_a_copied_clone_runs_its_own_code(clone):
    copy = clone.parent / "second"
    shutil.copytree(clone, copy, symlinks=True)
    assert code_of(copy)[0] == str(clone / "cats/__init__.py")  # what would happen without a look
    done = make(copy, "install")
    assert not done.returncode, done.stdout + done.stderr
    assert code_of(copy)[0] == str(copy / "cats/__init__.py")
    assert (copy / ".venv/bin/pip").read_text().startswith(f"#!{copy}/.venv/bin/python")


def test_make_alone_says_what_there_is_to_type(clone):
    said = make(clone).stdout
    for target in ("figures", "test", "check", "format", "lab", "bench", "record", "clean"):
        assert f"make {target} " in said
    assert "FLAGS=" in said and "PROFILE=" in said and "#" not in said


def test_lab_passes_flags_on_and_says_what_to_do_as_root(clone):
    assert (
        ".venv/bin/jupyter lab notebooks --allow-root --port 9999\n"
        in make(clone, "--dry-run", "lab", "FLAGS=--allow-root --port 9999").stdout
    )
    if os.getuid() == 0:
        done = make(clone, "lab", "FLAGS=--port 9999")
        assert (
            done.returncode
            and 'make lab FLAGS="--allow-root --port 9999"' in done.stderr
            and "jupyter" not in done.stdout
        )
