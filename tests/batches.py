"""The batch in a copy of the repository, so that nothing touches the real one's build folder: for
test_batch.py and slurm.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copy(folder, *names):
    """These files and folders of the repository, in a folder of their own."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"),
            )
        else:
            shutil.copy2(ROOT / name, folder / name)


def start(folder, profile, *options, **process):
    """The batch on a copy, as `make figures` starts it; `process` goes to Popen."""
    command = [sys.executable, "-m", "cats.paper.batch", profile, *options]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, **process)
