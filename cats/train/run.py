"""From text to a ScoreTable in five steps, each kept in the run's folder: model, states, heads,
meta, tables.

    run = Run("sentiment")                  # the demo; or Run("imdb", "albert-xlarge-v2",
    folder="build/imdb")
    run.backbone                            # fine-tunes F, or loads it
    run.table("validation")                 # does whatever is still missing before it

A step that is there and was made with the same settings from the same inputs is loaded; else it is
made. A killed run goes on where it was. One set of settings is one folder. On several GPUs or
machines the same, settings as JSON:

    accelerate launch --multi_gpu --num_processes 4 -m cats.train.run '{"task": "imdb", "model":
    "albert-xlarge-v2", "folder": "build/imdb"}'
"""

import argparse
import hashlib
import json
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cats._io import BUILD, ROOT, versions, write_json, writing
from cats.model.heads import Heads, fit_temperatures, train_heads
from cats.model.meta import Meta, score, train_meta
from cats.stats.table import TAU, ScoreTable
from cats.train import demo, tasks
from cats.train.finetune import fine_tune, load_fine_tuned
from cats.train.states import extract, processes


def save_module(module, path, about):
    """A module and what is known about it, in one safetensors file."""
    header = {
        "cats": json.dumps(
            {"kind": type(module).__name__, "shape": module.shape, "about": about}, sort_keys=True
        )
    }
    with writing(path) as aside:
        save_file(
            {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in module.state_dict().items()
            },
            aside,
            header,
        )


def load_module(kind, path):
    """A module that `save_module` wrote, and what is known about it."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("cats", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): train it again"
        ) from None
    if header.get("kind") != kind.__name__:
        raise ValueError(f"{path} holds {header.get('kind')!r}, expected {kind.__name__}")
    module = kind(**header["shape"])
    module.load_state_dict(tensors)
    return module.requires_grad_(False), header["about"]


@dataclass
class Run:
    """One task, one backbone, one seed.

    task      a name in tasks.TASKS, or a Task
    model     a Hub id or folder of a pretrained encoder, "demo" or "demo-shared"; or one that is
              fine-tuned already
    source    where the task's data is, if not at its default place
    folder    where everything is kept
    limit     at most so many rows of each split (see tasks.load)
    training, early, meta   options of fine_tune, train_heads and train_meta
    """

    task: str = "sentiment"
    model: str = "demo"
    source: str = ""
    folder: str = ""
    seed: int = 0
    limit: object = None
    fine_tuned: bool = False
    training: dict = field(default_factory=dict)
    early: dict = field(default_factory=dict)
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        self.task = tasks.find(self.task)
        self.backbone_name = Path(str(self.model)).name
        self.name = f"{self.task.name}-{self.backbone_name}-{self.seed}"
        self.folder = ROOT / self.folder if self.folder else BUILD / "demo" / "runs" / self.name
        if str(self.model).startswith("demo"):
            self.training = demo.RECIPES.get(self.task.name, {}) | dict(self.training)

    @cached_property
    def data(self):
        """Train, validation and test, and the training data cut into tune, scale and meta."""
        data = tasks.load(self.task, self.source, self.seed, self.limit)
        return {**data, **tasks.cut(data["train"], self.seed)}

    def _keep(self, path, settings, prepare, make):
        """Make what belongs at `path`, unless it is there and was made with these settings.

        `prepare` runs F, which all processes share; `make` is small, gets what that returned, and
        runs in the first one alone.
        """
        record, group = path.with_name(f"{path.stem}.settings.json"), processes()
        if not (path.exists() and _says(record, settings)):
            prepared = prepare()
            if group.is_main_process:
                record.unlink(
                    missing_ok=True
                )  # until the new file is whole, no old record may vouch for it
                make(prepared)
                write_json(record, settings)
            group.wait_for_everyone()

    @cached_property
    def _model(self):
        if self.fine_tuned:
            return load_fine_tuned(self.model, self.task)
        settings = {"model": str(self.model), "training": self.training, "seed": self.seed}
        settings["data"] = tasks.fingerprint(self.data["train"])
        folder, record = self.folder / "model", self.folder / "model.settings.json"
        if processes().is_main_process and not _says(
            record, settings
        ):  # neither a model nor checkpoints of other settings may be taken up
            shutil.rmtree(folder, ignore_errors=True)
            write_json(record, settings)
        processes().wait_for_everyone()
        if not (folder / "config.json").exists():
            fine_tune(self.task, self.data, self.model, folder, seed=self.seed, **self.training)
        return load_fine_tuned(folder, self.task)

    @property
    def backbone(self):
        """F, frozen."""
        return self._model[0]

    @property
    def tokenizer(self):
        return self._model[1]

    @property
    def max_length(self):
        return min(
            self.training.get("max_length") or self.task.max_length, self.backbone.max_tokens
        )

    def states(self, part):
        """Every layer's [CLS] of `tune`, `scale` or `meta`."""
        folder = self.folder / "states" / part
        return extract(
            self.backbone,
            self.tokenizer,
            self.data[part],
            self.task.columns,
            folder,
            max_length=self.max_length,
        )

    def labels(self, part):
        return np.array(self.data[part]["label"][:])

    @cached_property
    def _heads(self):
        path = self.folder / "heads.safetensors"

        def make(states):
            options = {name: value for name, value in self.early.items() if name != "labelled"}
            labels = {
                part: self.labels(part) if self.early.get("labelled", True) else None
                for part in states
            }
            heads, losses = train_heads(
                states["tune"], self.task.n_outputs, labels["tune"], seed=self.seed, **options
            )
            fit_temperatures(heads, states["scale"], labels["scale"])
            save_module(
                heads, path, {"losses": losses.tolist(), "model": self.backbone.fingerprint}
            )

        settings = {
            "model": self.backbone.fingerprint,
            "early": self.early,
            "seed": self.seed,
            "max_length": self.max_length,
        }
        settings |= {"data": tasks.fingerprint(self.data["train"])}
        self._keep(
            path, settings, lambda: {part: self.states(part) for part in ("tune", "scale")}, make
        )
        return load_module(Heads, path)

    @property
    def heads(self):
        """The early heads with their temperatures."""
        return self._heads[0]

    @cached_property
    def _metas(self):
        path, heads = self.folder / "meta.safetensors", self.heads

        def make(states):
            meta, losses = train_meta(heads, states, tau=TAU, seed=self.seed, **self.meta)
            save_module(meta, path, {"losses": losses.tolist(), "model": self.backbone.fingerprint})

        settings = {
            "heads": module_hash(heads),
            "meta": self.meta,
            "seed": self.seed,
            "data": tasks.fingerprint(self.data["train"]),
        }
        self._keep(path, settings, lambda: self.states("meta"), make)
        return load_module(Meta, path)

    @property
    def metas(self):
        """The meta classifiers."""
        return self._metas[0]

    def losses(self, what):
        """The training losses (epochs, l-1) of "heads" or "meta"."""
        return np.array((self._heads if what == "heads" else self._metas)[1]["losses"])

    def scored(self, part, metas=None):
        """A ScoreTable from extracted states of any part: quick, and not for shipping."""
        states = self.states(part)
        parts = [
            scores_of(self.heads, metas or self.metas, *states.read(i, "cls", "logits"))
            for i in range(states.n_chunks)
        ]
        order = np.argsort(np.concatenate([states.rows(i) for i in range(states.n_chunks)]))
        logits, meta = (
            torch.cat([p[name] for p in parts]).numpy()[order] for name in ("logits", "meta")
        )
        return ScoreTable(logits, meta, self.labels(part), self.about(part))

    def table(self, split):
        """The ScoreTable of `validation` or `test`: neither was ever trained on. Scores are
        computed in float32.
        """
        if split not in ("validation", "test"):
            raise ValueError(
                "tables are made of validation and test, which were never trained on, not of"
                f" {split!r}; see `scored`"
            )
        path, heads, metas = self.folder / f"{split}.safetensors", self.heads, self.metas
        settings = {
            "heads": module_hash(heads),
            "meta": module_hash(metas),
            "data": tasks.fingerprint(self.data[split]),
            "max_length": self.max_length,
        }

        def prepare():
            return extract(
                self.backbone,
                self.tokenizer,
                self.data[split],
                self.task.columns,
                self.folder / "scored" / split,
                max_length=self.max_length,
                **scoring(heads, metas),
            )

        self._keep(
            path,
            settings,
            prepare,
            lambda scored: table_of(scored, self.labels(split), self.about(split)).save(path),
        )
        return ScoreTable.load(path)

    def cat(self, measure="meta"):
        """The CAT of this run, calibrated on the validation split."""
        from cats.runtime.cat import CAT

        about = {
            "task": self.task.name,
            "tuning": len(self.data["train"]),
            "calibration": len(self.data["validation"]),
            "labelled": True,
        }
        table = self.table("validation")
        return CAT(
            self.backbone,
            self.tokenizer,
            self.heads,
            self.metas,
            table,
            max_length=self.max_length,
            measure=measure,
            texts=len(self.task.columns),
            about=about,
        )

    def about(self, split):
        """How a table of this run was made."""
        return {
            "task": self.task.name,
            "backbone": self.backbone_name,
            "split": split,
            "seed": self.seed,
            "source": (
                "demo"
                if (self.source or self.task.hub) == "demo"
                else Path(str(self.source or self.task.hub)).name
            ),
            "rows": {name: len(part) for name, part in self.data.items()},
            "model": self.backbone.fingerprint,
            "data": tasks.fingerprint(self.data[split]),
            "max_length": self.max_length,
            "training": self.training,
            "early": self.early,
            "meta": self.meta,
            "versions": versions("torch", "transformers", "datasets"),
        }


def scores_of(heads, metas, cls, logits):
    """Logits of all layers and meta scores, as `extract` stores them for a table."""
    early, meta = score(heads, metas, cls)
    return {"logits": torch.cat([early, logits[:, None].float()], 1), "meta": meta}


def scoring(heads, metas):
    """Options of `extract` for scores instead of states; a folder made with other heads is not
    taken up.
    """
    return {
        "read": lambda cls, logits: scores_of(heads, metas, cls, logits),
        "reads": f"scores {module_hash(heads)[:16]} {module_hash(metas)[:16]}",
    }


def table_of(scored, labels, about, tau=TAU):
    """A ScoreTable from extracted scores."""
    return ScoreTable(
        scored.gather("logits").numpy(), scored.gather("meta").numpy(), labels, about, tau
    )


def _says(record, settings):
    """Whether a settings file holds these settings."""
    return record.exists() and json.loads(record.read_text()) == json.loads(json.dumps(settings))


def module_hash(module):
    """A hash of a module's numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


STEPS = {
    "model": lambda run: run.backbone,
    "heads": lambda run: run.heads,
    "meta": lambda run: run.metas,
    "tables": lambda run: [run.table(split) for split in ("validation", "test")],
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m cats.train.run",
        description="One run, up to a step; what is there already is not made again.",
    )
    parser.add_argument("settings", help="the arguments of cats.train.run.Run, as JSON")
    parser.add_argument("--until", choices=STEPS, default="tables")
    arguments = parser.parse_args()
    print(f"process {processes().process_index + 1} of {processes().num_processes}", flush=True)
    STEPS[arguments.until](Run(**json.loads(arguments.settings)))
