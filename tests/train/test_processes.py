"""Several processes do what one does: each input once, in order, and the same table; also when the
numbers do not divide.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cats import ScoreTable
from cats.train.finetune import training_log
from cats.train.states import States

ROOT = Path(__file__).resolve().parents[2]
# 530 rows are two chunks of unequal length, 101 rows in chunks of 7 are 15: neither divides by two
SETTINGS = {
    "task": "sentiment",
    "limit": {"train": 200, "validation": 530, "test": 30},
    "head_options": {"epochs": 1},
    "meta_options": {"epochs": 1},
}
EXTRACT = """
import sys
from cats.train import tasks
from cats.model.backbone import Backbone
from cats.train.states import extract, processes
from transformers import AutoTokenizer
model, folder = sys.argv[1:]
print(f"process {processes().process_index + 1} of {processes().num_processes}", flush=True)
data = tasks.load("sentiment", limit={"train": 101})["train"]
tokenizer = AutoTokenizer.from_pretrained(model)
extract(Backbone.from_pretrained(model), tokenizer, data, ["text"], folder, max_length=32, chunk=7)
"""


def processes(n, *arguments):
    """Run a Python program in n processes, one thread each: the number of threads decides how sums
    are rounded.

    `--multi_gpu` is the launcher that starts several processes; with `--cpu` it starts one,
    whatever number it is given.
    """
    launch = (
        []
        if n == 1
        else [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(n),
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
        ]
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *launch, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr[-3000:]
    assert sorted(re.findall(r"process \d of \d", done.stdout)) == [
        f"process {i + 1} of {n}" for i in range(n)
    ]  # they know of each other


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A run by two processes, from fine-tuning to tables."""
    folder = tmp_path_factory.mktemp("two")
    processes(2, "-m", "cats.train.run", json.dumps(SETTINGS | {"folder": str(folder)}))
    return folder


def test_tables_of_two_processes_are_those_of_one(together, tmp_path):
    alone = SETTINGS | {
        "model": str(together / "model"),
        "fine_tuned": True,
        "folder": str(tmp_path),
    }
    processes(1, "-m", "cats.train.run", json.dumps(alone))
    two_homes = together / "paper", tmp_path / "paper"
    for what in ("heads", "meta"):
        two, one = ((home / f"{what}.safetensors").read_bytes() for home in two_homes)
        assert two == one
    for split in ("validation", "test"):
        two, one = (ScoreTable.load(home / f"{split}.safetensors") for home in two_homes)
        assert len(two) == SETTINGS["limit"][split]
        for name in ("logits", "meta", "labels"):
            np.testing.assert_array_equal(getattr(two, name), getattr(one, name))


def test_two_processes_train_as_one(together, tmp_path):
    """The same rows in every step but the last, which accelerate fills up; by itself the Trainer
    would report the sum of both processes.
    """
    processes(
        1,
        "-m",
        "cats.train.run",
        json.dumps(SETTINGS | {"folder": str(tmp_path)}),
        "--until",
        "model",
    )
    two, one = (
        [entry["loss"] for entry in training_log(folder / "model")]
        for folder in (together, tmp_path)
    )
    np.testing.assert_allclose(np.array(two[:-1], float), np.array(one[:-1], float), rtol=1e-3)


def test_states_of_two_processes_are_those_of_one(together, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(EXTRACT)
    for n in (1, 2):
        processes(n, program, together / "model", tmp_path / str(n))
    one, two = States(tmp_path / "1"), States(tmp_path / "2")
    assert len(list(two.folder.glob("*.safetensors"))) == two.n_chunks == 15
    assert sorted(np.concatenate([two.rows(i) for i in range(two.n_chunks)])) == list(range(101))
    for name in ("cls", "logits"):
        np.testing.assert_array_equal(one.gather(name).numpy(), two.gather(name).numpy())
