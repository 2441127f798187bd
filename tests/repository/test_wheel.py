"""A wheel, installed away from the checkout with what it asks for and nothing else, is all that CAT
and the statistics need.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import batches
import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
from importlib.util import find_spec
from pathlib import Path
import cats
import tiny
from cats import CAT

home = Path(cats.__file__).parent
extras = ("seaborn", "papermill", "snakemake", "onnxruntime", "pytest")
assert home.is_relative_to(sys.prefix) and not any(map(find_spec, extras))
table = cats.Synthetic(layers=4).table(300)
table.save("scores.safetensors")
table = cats.ScoreTable.load("scores.safetensors")
thresholds = cats.calibrate(table.scores("meta"), table.consistent, 0.1, method="first_exit")
texts = tiny.texts()["test"]
cat = tiny.fit()
cat.save_pretrained("cat")
found, again = (one.predict(texts, epsilon=0.5) for one in (cat, CAT.from_pretrained("cat")))
assert (found.exit_layers == again.exit_layers).all() and (found.exit_layers < 3).any()
assert not any("cats.paper" in name for name in sys.modules)
print(thresholds.shape, len(found.labels), Path("cat/README.md").exists())
"""


def needed(*wanted: str) -> dict[str, Distribution]:
    """What pip would install for these requirements, out of what is installed here."""
    found: dict[str, Distribution] = {}
    seen, todo = set(), list(wanted)
    while todo:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", todo.pop()).groups("")
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for other machines, or pip will say that it is missing
            continue
        for line in found[name].requires or ():
            extra = re.search(r"extra == ['\"]([\w-]+)", line)
            if extra is None or extra[1] in extras.split(","):
                todo.append(line)
    return found


@pytest.fixture
def environment(tmp_path):
    """An environment that has the packages of the core, lent by this one, and no other."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package in needed(*core).values():
        for name in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(package.locate_file(name))
    return tmp_path / "env"


def test_a_wheel_works_away_from_the_checkout(tmp_path, environment):
    copy, away = tmp_path / "copy", tmp_path / "away"
    copy.mkdir()
    away.mkdir()
    batches.copy(copy, "cats", "pyproject.toml", "README.md", "LICENSE")
    shutil.copy2(ROOT / "tests/tiny.py", away)  # how a small model is fitted
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel, python = tmp_path / "cats-0.1.0-py3-none-any.whl", environment / "bin/python"
    apart = ["--no-index", "--no-deps", "--no-build-isolation"]
    build = [*pip, "wheel", *apart, "--wheel-dir", tmp_path, copy]
    # it looks for what the wheel asks for, and fails where that is not there
    install = [*pip, "--python", python, "install", "--no-index", "--no-compile", wheel]
    for command in (build, install):
        done = subprocess.run(command, capture_output=True, text=True, cwd=away)
        assert not done.returncode, done.stdout + done.stderr
    names = zipfile.ZipFile(wheel).namelist()
    assert {"cats/py.typed", "cats/runtime/card.md"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "notebooks", "data"))]

    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([python, "-c", USE], env=given, capture_output=True, text=True, cwd=away)
    assert done.stdout.split("\n")[0] == "(3,) 24 True", done.stdout + done.stderr
