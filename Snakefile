"""The whole batch: papermill runs every notebook, executed copies go to build/, figures and tables to figures/.

    make figures                          the default profile
    make figures PROFILE=cpu              another one

A notebook runs again when it, the package, a table or one of its parameters has changed, and only then.
"""

import json
import os
from glob import glob

PROFILE = config["profile"]
PARAMETERS = config["parameters"]
OUT = f"build/{PROFILE}"
FIGURES = config.get("figures", "figures")
os.environ["CATS_FIGURES"] = os.path.abspath(FIGURES)  # a short run must not replace the real figures


rule all:
    input:
        expand(f"{OUT}/{{notebook}}.ipynb", notebook=PARAMETERS),


rule notebook:
    input:
        notebook="notebooks/{notebook}.ipynb",
        package=glob("cats/*.py"),
        tables=glob("data/**/*.safetensors", recursive=True),
    params:
        # JSON is YAML: papermill reads numbers, strings, lists and null from it
        values=lambda wildcards: json.dumps(PARAMETERS[wildcards.notebook] or {}),
        running=f"{OUT}/{{notebook}}.running.ipynb",
    output:
        f"{OUT}/{{notebook}}.ipynb",
        f"{FIGURES}/{{notebook}}.json",
    log:
        f"{OUT}/{{notebook}}.log",
    shell:
        # papermill saves after every cell, so a failed notebook is left as .running.ipynb with its traceback
        "papermill {input.notebook} {params.running} --cwd notebooks --kernel python3 -y {params.values:q} --progress-bar"
        " 2>&1 | tee {log} && mv {params.running} {output[0]}"
