"""The whole batch: papermill runs every notebook, executed copies go to build/, figures and tables
to figures/.

    make figures                          the default profile
    make figures PROFILE=cpu              another one
    make figures PROFILE=cpu LOCAL=path   models and data from path/models and path/datasets
    make figures CLUSTER=slurm            on a cluster, as notebooks/profiles/slurm/ says

A profile (notebooks/profiles/NAME.yaml) names the training runs, task x model x seed, and the
parameters of the other notebooks. A notebook runs again when it, the package, its parameters or
what it reads has changed, and only then. What is measured in seconds goes to figures/here/, beside
the committed record of one named run, which `make record` renews.
"""

import hashlib
import json
import os
import shlex
from glob import glob
from pathlib import Path

import yaml

PROFILE = config["profile"]
OUT = f"build/{PROFILE}"
FIGURES = config.get("figures", "figures")
PARAMETERS = config["parameters"]
STAGES = ["02_fine_tuning", "03_early_heads", "04_meta_classifiers", "05_scores"]
# what a stage does not know yet is not given to it, so that changing it leaves that stage alone
LATER = {
    "02_fine_tuning": {"head_options", "meta_options", "recipes"},
    "03_early_heads": {"meta_options"},
}
LOCAL = config.get("local")  # a folder with models/NAME and datasets/TASK instead of the Hub
BASE = os.path.relpath(LOCAL, "notebooks") if LOCAL else None
for run in config.get("runs", []) if LOCAL else ():
    run |= {
        "model": f"{BASE}/models/{Path(run['model']).name}",
        "source": f"{BASE}/datasets/{run['task']}",
    }
OLD = {"early": "head_options", "meta": "meta_options"}  # as profiles of 0.1.0 name them
RUNS = {
    f"{run['task']}-{Path(run['model']).name}-{run.get('seed', 0)}": {
        OLD.get(name, name): value for name, value in run.items()
    }
    for run in config.get("runs", [])
}
THREADS = config.get("threads", 1)
AFTER_RUNS = config.get("after_runs", [])  # notebooks that read what the runs left
ALONE = config.get("alone", [])  # notebooks that measure time: nothing runs beside them
# seconds of this machine leave the committed record alone; a profile with a folder of its own has
# no record to keep
HERE = FIGURES if "figures" in config else f"{FIGURES}/here"

# those that the runs of this profile make, where it ships them; notebooks run in their own folder
TABLES = os.path.abspath(os.environ.get("CATS_TABLES", config.get("ship", "data/tables")))
OURS = RUNS and TABLES == os.path.abspath(config.get("ship", ""))
os.environ["CATS_TABLES"] = TABLES


wildcard_constraints:
    stage="|".join(STAGES),
    run="|".join(RUNS) or "none",


SCORED = expand(f"{OUT}/runs/{{run}}/{STAGES[-1]}.ipynb", run=RUNS)

# papermill saves after every cell: a failed notebook is left as .running.ipynb with its traceback
EXECUTE = (
    '({params.launch}OMP_NUM_THREADS={threads} CATS_FIGURES="$PWD"/{params.figures:q}'
    " papermill {input.notebook:q} {params.running:q} --cwd notebooks --kernel python3"
    " -y {params.values:q} --progress-bar)"
    " 2>&1 | tee {log:q} && mv {params.running:q} {output[0]:q}"
)


def ask(what, default):
    """What a cluster is asked for, megabytes, minutes or GPUs: the profile says it for a stage or
    notebook, or the default holds.
    """

    def asked(wildcards):
        name = wildcards.get("stage", wildcards.get("notebook"))
        return config.get("resources", {}).get(name, {}).get(what, default)

    return asked


EXECUTED = expand(f"{OUT}/{{notebook}}.ipynb", notebook=PARAMETERS) + expand(
    f"{OUT}/runs/{{run}}/{{stage}}.ipynb", run=RUNS, stage=STAGES
)


PAGES = [f"{FIGURES}/index.html"] + ([f"{HERE}/index.html"] if ALONE and HERE != FIGURES else [])


# tables of one's own may be none yet, unless the runs of this profile make them
EXPLORER = []
if OURS or os.path.exists(f"{TABLES}/manifest.json"):
    # a clone has the page, and not what says that it was made: so it makes the page anew
    EXPLORER = [f"{FIGURES}/explorer.html", f"{OUT}/explorer.made"]


def content(paths):
    """One hash of some files, those that are there. A clone writes page and tables in the same
    moment, so by their times neither is older: as a parameter of its rule this tells.
    """
    found = [Path(path).read_bytes() for path in sorted(paths) if os.path.exists(path)]
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in found)).hexdigest()


RECORD = [path for name in ALONE for path in glob(f"{FIGURES}/{name}*")] if HERE != FIGURES else []


rule all:
    input:
        PAGES,
        EXPLORER,


rule explorer:
    input:
        package=glob("cats/**/*.py", recursive=True) + glob("cats/paper/explorer*"),
        tables=SCORED if OURS else f"{TABLES}/manifest.json",
    output:
        f"{FIGURES}/explorer.html",
        touch(f"{OUT}/explorer.made"),
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        tables=content([] if OURS else [f"{TABLES}/manifest.json"]),
    shell:
        "python -m cats.paper.explorer {FIGURES:q}"


rule gallery:
    input:
        executed=EXECUTED,
        explorer=EXPLORER,  # the page links to it
        record=RECORD,
    output:
        PAGES,
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        measured=expand(f"{OUT}/{{notebook}}.ipynb", notebook=ALONE),
        record=content(RECORD),
    shell:
        "python -m cats.paper.site {FIGURES:q} {input.executed:q}"
        + (" && python -m cats.paper.site {HERE:q} {params.measured:q}" if len(PAGES) > 1 else "")
        # both READMEs follow the committed figures, which this profile makes
        + (" && python -m cats.paper.summary" if PROFILE == "demo" else "")


def whole(run):
    """All settings of a run, its folder included."""
    return {"folder": f"{OUT}/runs/{run}"} | RUNS[run]


def as_yaml(values):
    """Parameters in one line, as papermill reads them: in YAML, which takes JSON's 1e-05, a rate of
    learning, for a word.
    """
    plain = json.loads(json.dumps(values))
    return yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**9).strip()


def parameters(wildcards):
    """A notebook's parameters; a `run` given by its name is that run of this profile, and `tasks`
    are read where the runs read theirs.
    """
    values = dict(PARAMETERS[wildcards.notebook] or {})
    if "run" in values:
        values["run"] = whole(values["run"])
    if LOCAL and "tasks" in values:
        values["sources"] = {task: f"{BASE}/datasets/{task}" for task in values["tasks"]}
    return as_yaml(values)


rule notebook:
    input:
        notebook="notebooks/{notebook}.ipynb",
        package=glob("cats/**/*.py", recursive=True),
        # the manifest holds the tables' hashes; of those made here the runs' notebooks speak
        tables=glob("data/paper/*.csv") + ([] if OURS else glob(f"{TABLES}/manifest.json")),
        runs=lambda wildcards: SCORED if wildcards.notebook in AFTER_RUNS else [],
    output:
        f"{OUT}/{{notebook}}.ipynb",
        f"{FIGURES}/{{notebook}}.json",
    log:
        f"{OUT}/{{notebook}}.log",
    wildcard_constraints:
        notebook="|".join(name for name in PARAMETERS if name not in ALONE) or "none",
    threads: 1
    resources:
        mem_mb=ask("mem_mb", 8000),
        runtime=ask("runtime", 60),
        gpu=ask("gpu", 0),
    params:
        values=parameters,
        launch="",
        figures=os.path.relpath(FIGURES),
        running=f"{OUT}/{{notebook}}.running.ipynb",
    shell:
        EXECUTE


use rule notebook as timed with:
    output:
        f"{OUT}/{{notebook}}.ipynb",
        f"{HERE}/{{notebook}}.json",
    wildcard_constraints:
        notebook="|".join(ALONE) or "none",
    threads: lambda wildcards: workflow.cores
    resources:
        mem_mb=ask("mem_mb", 8000),
        runtime=ask("runtime", 60),
        gpu=ask("gpu", 0),
        slurm_extra="--exclusive",  # alone on a node, too
    params:
        values=parameters,
        launch="",
        figures=os.path.relpath(HERE),
        running=f"{OUT}/{{notebook}}.running.ipynb",


def before(wildcards):
    """The stage a stage goes on from."""
    i = STAGES.index(wildcards.stage)
    return f"{OUT}/runs/{wildcards.run}/{STAGES[i - 1]}.ipynb" if i else []


def settings(wildcards):
    """What a stage is given: the settings of its run that it knows."""
    values = whole(wildcards.run)
    if "recipes" in config:
        values = {"recipes": config["recipes"]} | values
    if wildcards.stage == STAGES[-1] and "ship" in config:
        values["ship"] = config["ship"]
    later = LATER.get(wildcards.stage, ())
    return {name: value for name, value in values.items() if name not in later}


STEP = dict(zip(STAGES, ["model", "heads", "meta", "tables"]))


def launch(wildcards):
    """Several processes do the work first, where the profile says how to start them; the notebook
    then finds it done.
    """
    if "launch" not in config:
        return ""
    values = settings(wildcards)
    values |= {"folder": f"../{values['folder']}"}  # it runs in the notebooks' folder
    values.pop("ship", None)
    recipes = shlex.join(values.pop("recipes", ["paper", "distilled"]))
    run = f"{config['launch']} -m cats.train.run {shlex.quote(json.dumps(values))}"
    return f"(cd notebooks && {run} --until {STEP[wildcards.stage]} --recipes {recipes}) && "


rule stage:
    input:
        notebook="notebooks/{stage}.ipynb",
        package=glob("cats/**/*.py", recursive=True),
        before=before,
    output:
        f"{OUT}/runs/{{run}}/{{stage}}.ipynb",
        f"{FIGURES}/{{stage}}-{{run}}.json",
    log:
        f"{OUT}/runs/{{run}}/{{stage}}.log",
    priority: 1  # the longest way, on which others wait
    threads: THREADS
    resources:
        mem_mb=ask("mem_mb", 8000),
        runtime=ask("runtime", 240),
        gpu=ask("gpu", 0),
    params:
        values=lambda wildcards: as_yaml(settings(wildcards)),
        launch=launch,
        figures=os.path.relpath(FIGURES),
        running=f"{OUT}/runs/{{run}}/{{stage}}.running.ipynb",
    shell:
        EXECUTE
