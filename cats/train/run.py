"""From text to a ScoreTable in five steps, each kept in the run's folder: model, states, heads,
meta, tables.

    run = Run("imdb", "albert-xlarge-v2", folder="build/imdb")
    run.backbone                         # fine-tunes F, or loads it
    run.table("validation")              # does whatever is still missing before it
    run.by("distilled").table("test")    # the same F and its states, other heads

A step that is there and was made with the same settings from the same inputs is loaded; else it is
made. A killed run goes on where it was. One set of settings is one folder. On several GPUs or
machines the same, settings as JSON:

    accelerate launch --multi_gpu --num_processes 4 -m cats.train.run \\
        '{"task": "imdb", "model": "albert-xlarge-v2", "folder": "build/imdb"}'
"""

import argparse
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from cats._io import (
    load_module,
    module_digest,
    read_json,
    save_module,
    sha256,
    versions,
    write_json,
)
from cats.model.backbone import Backbone
from cats.model.exits import Heads, Meta, check_pair, score
from cats.stats.table import TAU, ScoreTable
from cats.train import demo, tasks
from cats.train.finetune import fine_tune, load_fine_tuned, readable
from cats.train.fit import Recipe, find_recipe, fit_heads, fit_meta, read_chunk
from cats.train.states import Joined, States, extract, processes, tokenizer_hash

log = logging.getLogger(__name__)


@dataclass
class Run:
    """One task, one backbone, one seed, one recipe.

    task      a name in tasks.TASKS, or a Task
    model     a Hub id or folder of a pretrained encoder, "demo" or "demo-shared"; or one that is
              fine-tuned already
    source    where the task's data is, if not at its default place
    folder    where everything is kept; what does not depend on the recipe is kept once
    limit     at most so many rows of each split (see tasks.load)
    recipe    how heads and meta classifiers are made: a name in fit.RECIPES, or a Recipe
    training, head_options, meta_options   what fine_tune, fit_heads and fit_meta are told besides;
              in files the last two are `early` and `meta`, as in those of the first version
    """

    task: Any = "sentiment"
    model: str = "demo"
    source: str = ""
    folder: Any = ""
    seed: int = 0
    limit: Any = None
    fine_tuned: bool = False
    recipe: Any = "paper"
    training: dict = field(default_factory=dict)
    head_options: dict = field(default_factory=dict)
    meta_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not str(self.folder):
            raise ValueError(
                "a run needs a folder to keep things in: Run(..., folder='build/mine')"
            )
        self.task, self.recipe = tasks.find(self.task), find_recipe(self.recipe)
        self.backbone_name = Path(str(self.model)).name
        self.name = f"{self.task.name}-{self.backbone_name}-{self.seed}"
        self.folder = Path(self.folder)
        if str(self.model).startswith("demo"):
            self.training = demo.RECIPES.get(self.task.name, {}) | dict(self.training)

    def by(self, recipe: str | Recipe) -> "Run":
        """The same run with heads and meta classifiers of another recipe; F is shared."""
        mine = {one.name: getattr(self, one.name) for one in fields(self)}
        other = Run(**mine | {"recipe": recipe})
        for name in ("data", "_model"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    @cached_property
    def data(self) -> dict[str, Dataset]:
        """Train, validation and test, and the training data cut into tune, scale and meta."""
        data = tasks.load(self.task, self.source, self.seed, self.limit)
        return {**data, **tasks.cut(data["train"], self.seed)}

    def learned(self, part: str) -> States | Joined:
        """The states that heads (`tune`) or meta classifiers (`meta`) learn from: altered copies
        too, if the recipe says so.
        """
        states = self.states(part)
        return Joined(states, self.states(f"{part}-altered")) if self.recipe.altered else states

    def _keep(
        self,
        path: Path,
        settings: Any,
        prepare: Callable[[], Any],
        make: Callable[[Any], Any],
        load: Callable[[Path], Any],
    ) -> Any:
        """What `load` reads at `path`; made first, unless it is there, whole, and was made with
        these settings.

        `prepare` runs F, which all processes share; `make` is small, gets what that returned, and
        runs in the first one alone.
        """
        record, group = path.with_name(f"{path.stem}.settings.json"), processes()
        if _says(record, settings):
            try:
                return load(path)
            except FileNotFoundError:
                pass
            except ValueError as error:
                log.warning("%s; it is made again", error)
        prepared = prepare()
        if group.is_main_process:
            # until the new file is whole, no old record may vouch for it
            record.unlink(missing_ok=True)
            make(prepared)
            write_json(record, settings)
        group.wait_for_everyone()
        return load(path)

    @cached_property
    def _model(self) -> tuple[Backbone, PreTrainedTokenizerBase]:
        if self.fine_tuned:
            return load_fine_tuned(self.model, self.task)
        folder, record = self.folder / "model", self.folder / "model.settings.json"
        hashes = self.folder / "model.files.json"
        if Path(str(self.model)).resolve().is_relative_to(folder.resolve()):
            raise FileExistsError(
                f"{self.model} lies where this run would put its own model: give the run another"
                " folder, or say fine_tuned=True to take it as it is"
            )
        settings = {"model": str(self.model), "training": self.training, "seed": self.seed}
        settings["data"] = tasks.fingerprint(self.data["train"])
        if processes().is_main_process:
            same = _says(record, settings)
            if folder.exists() and not record.exists():
                raise FileExistsError(
                    f"{folder} is there and was not made by a run: give this run another folder"
                )
            # neither a model nor checkpoints of other settings may be taken up, nor a damaged one
            if not same or not _whole(folder, hashes):
                if same:
                    log.warning("the model in %s is damaged: it is made again", folder)
                shutil.rmtree(folder, ignore_errors=True)
                hashes.unlink(missing_ok=True)
                write_json(record, settings)
        processes().wait_for_everyone()
        if not (folder / "config.json").exists():
            fine_tune(self.task, self.data, self.model, folder, seed=self.seed, **self.training)
        if processes().is_main_process and not hashes.exists():
            write_json(hashes, {path.name: sha256(path) for path in sorted(folder.glob("*.*"))})
        return load_fine_tuned(folder, self.task)

    @property
    def backbone(self) -> Backbone:
        """F, frozen."""
        return self._model[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._model[1]

    @property
    def max_length(self) -> int:
        return min(
            self.training.get("max_length") or self.task.max_length, self.backbone.max_tokens
        )

    def states(self, part: str) -> States:
        """What every layer of F gave of a part: tune, scale, meta, validation or test; of
        `tune-altered` or `meta-altered`.
        """
        folder, (whole, *copies) = self.folder / "states" / part, part.split("-")
        data = self.data[whole]
        if copies:
            data = tasks.altered(data, self.task.columns, self.recipe.altered, seed=self.seed)
        return extract(
            self.backbone,
            self.tokenizer,
            data,
            self.task.columns,
            folder,
            max_length=self.max_length,
        )

    def labels(self, part: str) -> np.ndarray:
        return np.array(self.data[part]["label"][:])

    @property
    def home(self) -> Path:
        """Where this recipe's heads, meta classifiers and tables are kept."""
        return self.folder / re.sub(r"[^\w.=+-]+", "-", self.recipe.name)

    def _origin(self, split: str) -> dict:
        """What everything made from a split depends on: F, its tokens and the data."""
        return {
            "model": self.backbone.fingerprint,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "max_length": self.max_length,
            "data": tasks.fingerprint(self.data[split]),
        }

    @cached_property
    def _heads(self) -> tuple[Heads, dict[str, Any]]:
        path = self.home / "heads.safetensors"
        parts = ("tune", "scale")

        def make(states: tuple[States | Joined, States]) -> None:
            labels = tuple(self.labels(part) for part in parts)
            heads, losses = fit_heads(
                *states,
                self.task.n_outputs,
                labels,
                recipe=self.recipe,
                seed=self.seed,
                **self.head_options,
            )
            about = {"losses": losses.tolist(), "model": self.backbone.fingerprint}
            save_module(heads, path, about | {"recipe": asdict(self.recipe)})

        settings = self._origin("train") | {
            "recipe": asdict(self.recipe),
            "early": self.head_options,
            "seed": self.seed,
        }
        return self._keep(
            path,
            settings,
            lambda: (self.learned("tune"), self.states("scale")),
            make,
            lambda path: load_module(Heads, path),
        )

    @property
    def heads(self) -> Heads:
        """The early heads with their temperatures."""
        return self._heads[0]

    @cached_property
    def _meta(self) -> tuple[Meta, dict[str, Any]]:
        path, heads = self.home / "meta.safetensors", self.heads

        def make(states: States | Joined) -> None:
            meta, losses = fit_meta(
                heads, states, recipe=self.recipe, tau=TAU, seed=self.seed, **self.meta_options
            )
            about = {"losses": losses.tolist(), "model": self.backbone.fingerprint}
            save_module(meta, path, about | {"recipe": asdict(self.recipe)})

        settings = self._origin("train") | {
            "heads": module_digest(heads),
            "recipe": asdict(self.recipe),
            "meta": self.meta_options,
            "seed": self.seed,
        }
        return self._keep(
            path,
            settings,
            lambda: self.learned("meta"),
            make,
            lambda path: load_module(Meta, path),
        )

    @property
    def meta(self) -> Meta:
        """The meta classifiers."""
        return self._meta[0]

    def losses(self, what: str) -> np.ndarray:
        """The training losses (epochs, l-1) of "heads" or "meta"."""
        return np.array((self._heads if what == "heads" else self._meta)[1]["losses"])

    def scored(self, part: str, meta: Meta | None = None) -> ScoreTable:
        """A ScoreTable of any part: quick, and not for shipping."""
        meta = meta or self.meta
        return table_of(self.states(part), self.heads, meta, self.labels(part), self.about(part))

    def table(self, split: str) -> ScoreTable:
        """The ScoreTable of `validation` or `test`: neither was ever trained on. Scores are
        computed in float32.
        """
        if split not in ("validation", "test"):
            raise ValueError(
                "tables are made of validation and test, which were never trained on, not of"
                f" {split!r}; see `scored`"
            )
        path, heads, meta = self.home / f"{split}.safetensors", self.heads, self.meta
        settings = self._origin(split) | {
            "heads": module_digest(heads),
            "meta": module_digest(meta),
        }
        return self._keep(
            path,
            settings,
            lambda: self.states(split),
            lambda states: table_of(
                states, heads, meta, self.labels(split), self.about(split)
            ).save(path),
            ScoreTable.load,
        )

    def about(self, split: str) -> dict:
        """How a table of this run was made."""
        source = str(self.source or self.task.hub)
        return {
            "task": self.task.name,
            "backbone": self.backbone_name,
            "split": split,
            "seed": self.seed,
            "source": Path(source).name,
            "rows": {name: len(part) for name, part in self.data.items()},
            "model": self.backbone.fingerprint,
            "data": tasks.fingerprint(self.data[split]),
            "max_length": self.max_length,
            "recipe": asdict(self.recipe),
            "training": self.training,
            "early": self.head_options,
            "meta": self.meta_options,
            "versions": versions("torch", "transformers", "datasets"),
        }


def table_of(
    states: States, heads: Heads, meta: Meta, labels: Any, about: dict, tau: float = TAU
) -> ScoreTable:
    """A ScoreTable from extracted states, in the order of the data."""
    check_pair(heads, meta, module_digest(heads))
    logits = torch.empty(len(states), heads.early + 1, heads.n_outputs)
    scores = torch.empty(len(states), heads.early)
    for i in range(states.n_chunks):
        rows = torch.from_numpy(states.rows(i))
        logits[rows, :-1], scores[rows] = score(heads, meta, read_chunk(states, i, heads.reads))
        logits[rows, -1] = states.read(i, "logits")[0]
    return ScoreTable(logits.numpy(), scores.numpy(), labels, about, tau)


def _says(record: Path, settings: dict) -> bool:
    """Whether a settings file holds these settings."""
    return read_json(record) == json.loads(json.dumps(settings))


def _whole(folder: Path, hashes: Path) -> bool:
    """Whether a model is not there yet, or is as it was when it was made. One of a run that kept
    no hashes is taken as it is, if its files can be read.
    """
    if not (folder / "config.json").exists():
        return not hashes.exists()
    kept = read_json(hashes)
    if not isinstance(kept, dict) or not kept:
        weights = sorted(folder.glob("*.safetensors"))
        return bool(weights) and all(map(readable, [folder / "config.json", *weights]))
    found = {name: sha256(folder / name) for name in kept if (folder / name).is_file()}
    return found == kept


STEPS = {
    "model": lambda run: run.backbone,
    "heads": lambda run: run.heads,
    "meta": lambda run: run.meta,
    "tables": lambda run: [run.table(split) for split in ("validation", "test")],
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m cats.train.run",
        description="One run, up to a step; what is there already is not made again.",
    )
    parser.add_argument("settings", help="the arguments of cats.train.run.Run, as JSON")
    parser.add_argument("--until", choices=STEPS, default="tables")
    parser.add_argument("--recipes", nargs="+", default=["paper"], help="names in fit.RECIPES")
    arguments = parser.parse_args()
    print(f"process {processes().process_index + 1} of {processes().num_processes}", flush=True)
    whole = Run(**json.loads(arguments.settings))
    for name in arguments.recipes:
        STEPS[arguments.until](whole.by(name))
