"""A wheel, installed away from the checkout, is all that CAT and the statistics need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import batches

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
from pathlib import Path
import cats
from cats import CAT

home = Path(cats.__file__).parent
assert home == Path(sys.argv[1]) / "cats" and not any("cats.paper" in name for name in sys.modules)
table = cats.Synthetic(layers=4).table(300)
table.save("scores.safetensors")
table = cats.ScoreTable.load("scores.safetensors")
thresholds = cats.calibrate(table.scores("meta"), table.consistent, 0.1, method="first_exit")
print(CAT.__name__, thresholds.shape, (home / "runtime/card.md").exists())
"""


def test_a_wheel_works_away_from_the_checkout(tmp_path):
    copy, away, site = tmp_path / "copy", tmp_path / "away", tmp_path / "site"
    copy.mkdir()
    away.mkdir()
    batches.copy(copy, "cats", "pyproject.toml", "README.md", "LICENSE")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    for command in (
        ["wheel", *alone, "--no-build-isolation", "--wheel-dir", tmp_path, copy],
        ["install", *alone, "--target", site, tmp_path / "cats-0.1.0-py3-none-any.whl"],
    ):
        done = subprocess.run([*pip, *command], capture_output=True, text=True, cwd=away)
        assert not done.returncode, done.stdout + done.stderr
    names = zipfile.ZipFile(tmp_path / "cats-0.1.0-py3-none-any.whl").namelist()
    assert {"cats/py.typed", "cats/runtime/card.md"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "notebooks", "data"))]

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -P and this path: neither the folder one stands in nor the checkout comes first
    done = subprocess.run(
        [sys.executable, "-P", "-c", USE, site],
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        cwd=away,
    )
    assert done.stdout.split("\n")[0] == "CAT (3,) True", done.stdout + done.stderr
