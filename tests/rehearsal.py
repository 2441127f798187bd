"""The `paper` profile from start to end, with stand-ins for what is not at hand: `make rehearsal`.

Tiny random encoders take the names of Albert-xlarge, Albert-base and RoBERTa-large, with tokenizers
of the same classes, and generated text takes the place of the four tasks, in their columns and
formats. All runs of the profile go through all stages, and every figure and table that it lists is
drawn from their tables: by the command that a user types, in a copy of the repository, offline.
Sizes are laid over the profile, which stays as it is. Nothing that is learned here means anything.

At the end it says what was made and which models every figure is about, and fails if something is
missing or names a model that it does not show. Everything is in build/rehearsal/.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import batches
import pypdf
import torch
import yaml
from transformers import (
    AlbertConfig,
    AlbertTokenizer,
    AutoModel,
    RobertaConfig,
    RobertaTokenizer,
)

from cats.paper import store, style
from cats.stats.table import ScoreTable
from cats.train import demo, tasks

FOLDER = batches.ROOT / "build/rehearsal"
LOCAL = "stand-ins"  # in it models/NAME and datasets/TASK
# the real depths, since figures say them; one width for all
MODELS = {
    "albert-xlarge-v2": (AlbertConfig, AlbertTokenizer, 24),
    "albert-base-v2": (AlbertConfig, AlbertTokenizer, 12),
    "roberta-large": (RobertaConfig, RobertaTokenizer, 24),
}
# of random weights, so that the last layer still tells texts apart: one layer again and again
# forgets them where weights are large, different ones where they are small
RANGES = {AlbertConfig: 0.05, RobertaConfig: 0.3}
SHAPE = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 514,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WORDS = 600  # of a tokenizer
MIRRORS = {"imdb": "sentiment", "vitaminc": "claims", "ag_news": "topics", "stsb": "similarity"}
ROWS = {"train": 800, "validation": 500, "test": 1000}
# laid over every run and over notebooks; other notebooks take what the short profile gives them
SMALLER = {
    "limit": ROWS,
    "training": {"epochs": 1, "max_length": 48, "save_strategy": "no", "standardise": True},
    "head_options": {"epochs": 2},
    "meta_options": {"epochs": 2},
}
# these few steps teach nothing but one answer for all texts, so the profile's small rate stays: F
# keeps its random ones; a score has to come to its scale
RATES = {"stsb": {"learning_rate": 0.001}}
FEWER = {"42_heads": {"trials": 3}, "43_choosing": {"n": 500, "trials": 4}}


def stand_in(folder, name, texts):
    """A tiny random encoder under a real one's name, with a tokenizer that has read these texts."""
    config, tokenizer, layers = MODELS[name]
    tokens = tokenizer().train_new_from_iterator(texts, vocab_size=WORDS, show_progress=False)
    tokens.model_max_length = 512
    special = {f"{kind}_token_id": getattr(tokens, f"{kind}_token_id") for kind in ("pad", "bos")}
    if config is AlbertConfig:
        special |= {"embedding_size": 16, "classifier_dropout_prob": 0.0}
    torch.manual_seed(0)
    shape = SHAPE | special | {"vocab_size": len(tokens), "num_hidden_layers": layers}
    shape["initializer_range"] = RANGES[config]
    AutoModel.from_config(config(**shape)).save_pretrained(folder / "models" / name)
    tokens.save_pretrained(folder / "models" / name)


def generated(task, split, rows):
    """Rows of a split with the columns that the task has on the Hub."""
    data = demo.corpus(MIRRORS[task], split, rows).remove_columns("difficulty")  # no real one
    data = data.rename_columns(dict(zip(data.column_names, tasks.TASKS[task].columns)))
    if task == "vitaminc":  # labels by name there
        names = tasks.TASKS[task].labels
        labels = [names[label] for label in data["label"][:]]
        data = data.remove_columns("label").add_column("label", labels)
    hub = {ours: theirs for theirs, ours in tasks.TASKS[task].rename.items()}
    return data.rename_columns({name: hub[name] for name in data.column_names if name in hub})


def data_set(folder, task):
    """Files of a generated task, split as the real one is; every text in it."""
    sizes, texts = dict(ROWS), []
    if task in ("imdb", "ag_news"):  # these have no validation split of their own
        del sizes["validation"]
        sizes["train"] += tasks.TASKS[task].validation
    (folder / "datasets" / task).mkdir(parents=True)
    for split, rows in sizes.items():
        data = generated(task, split, rows)
        data.to_parquet(folder / "datasets" / task / f"{split}.parquet")
        texts += [text for column in tasks.TASKS[task].columns for text in data[column][:]]
    return texts


def smaller(profile, short):
    """A profile with fewer rows, epochs and trials: all its runs and notebooks, and how F is
    computed, stay.
    """
    runs = [
        run
        | SMALLER
        | {"training": run["training"] | SMALLER["training"] | RATES.get(run["task"], {})}
        for run in profile["runs"]
    ]
    less = {
        name: {key: value for key, value in (values or {}).items() if key != "run"}
        for name, values in (short["parameters"] | FEWER).items()
    }
    given = {
        name: less.get(name, {}) | (values or {}) for name, values in profile["parameters"].items()
    }
    return profile | {"runs": runs, "threads": 1, "parameters": given}


def prepare(folder):
    """A copy of the repository with stand-ins, and the profile that it will run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    batches.copy(folder, "cats", "notebooks", "Snakefile")
    shutil.copytree(batches.ROOT / "data/paper", folder / "data/paper")
    texts = [text for task in MIRRORS for text in data_set(folder / LOCAL, task)]
    for name in MODELS:
        stand_in(folder / LOCAL, name, texts)
    paper, short = (
        yaml.safe_load((batches.ROOT / f"notebooks/profiles/{name}.yaml").read_text())
        for name in ("paper", "short")
    )
    profile = smaller(paper, short)
    (folder / "rehearsal.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    return profile


def names(runs):
    """The runs of a profile by name: (task, model)."""
    return {
        f"{run['task']}-{Path(run['model']).name}-{run.get('seed', 0)}": (
            run["task"],
            Path(run["model"]).name,
        )
        for run in runs
    }


def expected(profile, committed):
    """The files that have to be in the figures folder: for each notebook of the profile those that
    the committed ones have, for each run those of every stage. What compares seeds only where the
    profile has more than one.
    """
    wanted = {f"32_other_backbones_c3.{kind}" for kind in ("png", "pdf", "csv")}
    wanted |= {"index.html", "explorer.html"}
    runs, seeds = names(profile["runs"]), {run.get("seed", 0) for run in profile["runs"]}
    for path in committed:
        stem, run = re.fullmatch(r"([^-]+)(-.+)?", path.stem).groups()
        stage = re.match("0[2-5]_", stem)
        if stage and path.name.startswith(f"{stem}-sentiment") and "difficulty" not in stem:
            wanted |= {f"{stem}-{name}{path.suffix}" for name in runs}
        elif len(seeds) == 1 and re.search("_seeds?$", stem):
            continue
        elif not run and any(stem.startswith(name) for name in profile["parameters"]):
            wanted.add(path.name)
    return wanted


def words(path):
    """What a picture or a table says."""
    if path.suffix == ".pdf":
        return "\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)
    return path.read_text()


def named(text):
    """The models that a text names, by slug or as they are written."""
    found = re.findall("|".join(map(re.escape, sorted(SPELLED, key=len, reverse=True))), text)
    return {SPELLED[name] for name in found}


SPELLED = {name: slug for slug, look in style.MODELS.items() for name in (slug, look.name)}


def shown(record, tables):
    """The models that a figure is about, as its record says: the tables it was drawn from, or the
    model it was given.
    """
    content = json.loads(record.read_text())
    about = {tables[value] for value in content["inputs"].values() if value in tables}
    model = content["parameters"].get("model") or content["parameters"].get("backbone")
    return about or ({Path(model).name} if model else set())


def hashes(folder):
    """The model of every table in a folder of tables, by the table's hash."""
    return {
        ScoreTable.load(folder / name).sha256: entry["backbone"]
        for name, entry in store.manifest(folder).items()
        if entry["what"] in store.SPLITS
    }


def wrong(figures, profile, tables, committed):
    """What is missing, and what names a model that it is not about; a line each."""
    there = {path.name for path in figures.glob("*")}
    yield from (f"{name} was not made" for name in sorted(expected(profile, committed) - there))
    models = {model for _, model in names(profile["runs"]).values()}
    for record in sorted(figures.glob("*.json")):
        about = shown(record, tables)
        for path in (record.with_suffix(suffix) for suffix in (".pdf", ".md")):
            if path.exists() and about and not record.name.startswith("25_"):  # it times others
                said = named(words(path))
                if said - about:
                    yield f"{path.name} names {listed(said - about)} and is about {listed(about)}"
                if path.suffix == ".pdf" and len(about) == 1 and not said:
                    yield f"{path.name} does not say that it is about {listed(about)}"
        if strangers := about - models:
            yield f"{record.stem} is about {listed(strangers)}, which no run made"


def listed(models):
    return ", ".join(sorted(map(style.written, models)))


def shipped(folder, profile):
    """Which tables, heads and meta classifiers the runs did not leave; a line each."""
    known = store.manifest(folder)
    for task, model in names(profile["runs"]).values():
        for recipe in profile.get("recipes", ["paper", "distilled"]):
            for what in store.KEPT:
                if store.file_name(task, model, what, recipe) not in known:
                    yield f"no {what} of {style.written(task)}, {style.written(model)}, {recipe}"


def summary(figures, tables):
    """What each figure and table is about: the models it names, or those of its tables."""
    groups = {}
    for record in sorted(figures.glob("*.json")):
        stage = re.match(r"0[2-5]_\w+", record.stem)
        name = f"{stage[0]} of each run" if stage else record.stem
        picture = record.with_suffix(".pdf")
        said = named(words(picture)) if picture.exists() and not name.startswith("25_") else set()
        groups.setdefault(name, set()).update(said or shown(record, tables))
    return [
        f"  {name}: {listed(about) if about else 'no model of these runs'}"
        for name, about in groups.items()
    ]


def main(cores="2"):
    start = time.monotonic()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(FOLDER / "cache")}
    profile = prepare(FOLDER)
    print(
        f"rehearsal: {len(profile['runs'])} runs of stand-ins and {len(profile['parameters'])}"
        f" notebooks, in {FOLDER.relative_to(batches.ROOT)}/",
        flush=True,
    )
    options = ["--quiet", "rules", "--config", f"local={LOCAL}", "--cores", cores]
    code = batches.start(FOLDER, "rehearsal.yaml", *options).wait()
    return code or closing(FOLDER, profile, time.monotonic() - start)


def closing(folder, profile, seconds):
    """Say what was made and what is wrong with it; 1 if anything is."""
    figures, kept = folder / profile["figures"], folder / profile["ship"]
    tables = hashes(kept)
    committed = sorted((batches.ROOT / "figures").glob("*"))
    faults = [*shipped(kept, profile), *wrong(figures, profile, tables, committed)]
    print(f"rehearsal: {len(tables)} tables; what every figure and table is about:")
    print(*summary(figures, tables), sep="\n")
    made = len(list(figures.glob("*")))
    print(f"rehearsal: {made} files in {seconds / 60:.1f} minutes, {len(faults)} faults")
    for fault in faults:
        print(f"rehearsal: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
