"""The batch from start to end: one at a time in a folder, and at its end, in plain words, what came
of it.

    profile=notebooks/profiles/demo.yaml
    python -m cats.paper.batch $profile --cores 2                  what `make figures` does
    python -m cats.paper.batch $profile --cores 2 10_calibration   one notebook and what it needs
    python -m cats.paper.batch $profile --record                   what `make record` does

What follows the profile goes to Snakemake: options, files to make, or notebooks by name.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import yaml

from cats._io import writing

LOCK = Path("build/batch.lock")
DRY = {"-n", "--dry-run", "--dryrun"}


@contextmanager
def locked(lock: Path = LOCK) -> Iterator[Any]:
    """Hold the folder for one batch; the file to write to, which says who holds it.

    The system keeps the lock for as long as a process has the file open: a batch that is killed
    leaves none behind.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "it has only just started"
            sys.exit(
                f"Another batch is running in this folder: {who}."
                " Wait until it is done, or end it and start again: what it has done is kept."
            )
        yield file
        file.truncate(0)


def run(profile: str, arguments: Sequence[str]) -> int:
    """Snakemake with a profile; its exit code."""
    content = yaml.safe_load(Path(profile).read_text())
    named = {name: f"build/{content['profile']}/{name}.ipynb" for name in content["parameters"]}
    # --nolock: the lock is ours; --rerun-incomplete: half-made outputs are made again
    # what we are given comes last: a target right after --configfile would be taken for another one
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--configfile",
        str(profile),
        "--nolock",
        "--rerun-incomplete",
        "--keep-going",
    ]
    command += [named.get(argument, argument) for argument in arguments]
    if DRY & set(arguments):
        return subprocess.run(command).returncode
    with locked() as file:
        process = subprocess.Popen(
            command, pass_fds=[file.fileno()]
        )  # it holds the folder, too, should we be killed
        file.truncate(0)
        file.write(f"{profile}, process {process.pid}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        start = os.stat(
            file.fileno()
        ).st_mtime  # by the clock of the file system, which may be another machine's
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = wait(process)
    for line in closing(content, code, start):
        print(line, file=sys.stderr)
    return code


def wait(process: subprocess.Popen) -> int:
    """The exit code; an interrupt from the keyboard has reached Snakemake, too, which ends its jobs
    first.
    """
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def closing(content: Mapping[str, Any], code: int, start: float) -> Iterator[str]:
    """What a batch has to say at its end: what failed, what differs, where the seconds are."""
    name = content["profile"]
    if code:
        yield from failures(Path("build") / name, start)
    figures = Path(content.get("figures", "figures"))
    yield from differences(figures)
    here = figures / "here"
    if content.get("alone") and (here / "index.html").exists():
        yield (
            f"What this machine measured in seconds is in {here}/, beside the record in {figures}/"
            " (make record renews it)."
        )
    if not code and (figures / "index.html").exists():
        yield f"Everything on one page: {figures}/index.html"


def failures(folder: Path, start: float) -> Iterator[str]:
    """The notebooks that failed since `start`, and where their tracebacks are.

    They have a log without an executed notebook beside it: Snakemake takes away what a failed job
    has made, and leaves its log.
    """
    logs = [
        path
        for path in sorted(folder.rglob("*.log"))
        if path.stat().st_mtime >= start and not path.with_suffix(".ipynb").exists()
    ]
    failed, stopped = [], []
    for log in logs:
        run = f" ({log.parent.name})" if log.parent != folder else ""
        running = log.with_suffix(".running.ipynb")
        error = first_error(running) if running.exists() else None
        if error:
            failed.append(f"  {log.stem}{run}: {error}\n    traceback: {running}")
        elif lines := [
            line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line
        ]:
            failed.append(f"  {log.stem}{run}: {lines[-1][:200]}\n    what it said: {log}")
        else:
            stopped.append(log.stem + run)
    if failed:
        count = "1 notebook" if len(failed) == 1 else f"{len(failed)} notebooks"
        yield f"{count} failed, and what depends on them was not run:"
        yield from failed
    if stopped:
        yield f"Stopped in the middle: {', '.join(stopped)}."
    if not logs:
        yield "The batch failed outside the notebooks; what is wrong is said above."
    yield "The same command goes on from here: what is done is kept."


def first_error(path: Path) -> str | None:
    """The first error in a notebook, in one line; None if there is none but an interrupt."""
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:  # killed while it was written
        return None
    for cell in cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error" and output.ename != "KeyboardInterrupt":
                return f"{output.ename}: {output.evalue}".splitlines()[0][:200]
    return None


def git(*arguments: str) -> list[str]:
    """Lines that git says; none where there is no git, or nothing of it here."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *arguments], capture_output=True, text=True
        )
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if not done.returncode else []


def differences(figures: Path) -> Iterator[str]:
    """How the figures differ from the committed ones; silent where none are, as in a copy without
    git.
    """
    committed = git("ls-files", "--", str(figures))
    if not committed:
        return
    changed = git("diff", "--name-only", "--relative", "HEAD", "--", str(figures))
    new = git("ls-files", "--others", "--exclude-standard", "--", str(figures))
    if not changed:
        yield f"All {len(committed)} files in {figures}/ are as committed."
    else:
        count = f"{len(changed)} of {len(committed)} files differ"
        yield f"{count} from the committed ones: {some(changed)}"
        if git("diff", "--name-only", "--relative", "HEAD", "--", "README.md"):
            yield "  README.md, which quotes their numbers, differs with them."
        yield "  What was trained here may differ in last digits from another processor's."
        yield f"  (git diff shows how; git checkout {figures} brings the committed ones back)"
    if new:
        yield f"{len(new)} new: {some(new)}"


def some(names: Sequence[str], at_most: int = 20) -> str:
    """Names in a row, no more than fit on a screen: another Python changes every JSON file."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def record(profile: str) -> int:
    """Make what this machine measured the record: copy it to figures/."""
    content = yaml.safe_load(Path(profile).read_text())
    figures, name = Path("figures"), content["profile"]
    source = Path(content.get("figures", figures / "here"))
    found = [path for stem in content.get("alone", []) for path in sorted(source.glob(f"{stem}*"))]
    if not any(
        path.suffix == ".json" and "measured" in json.loads(path.read_text()) for path in found
    ):
        sys.exit(f"Nothing has been measured in {source}/: run make figures PROFILE={name} first.")
    with locked():
        for path in found:
            with writing(figures / path.name) as aside:
                shutil.copyfile(path, aside)
    print(
        f"{len(found)} files from {source}/ are the record now. make figures puts them on the page;"
        " put the README in step."
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    profile, *rest = arguments
    if not Path(profile).exists():
        there = ", ".join(sorted(path.stem for path in Path("notebooks/profiles").glob("*.yaml")))
        sys.exit(
            f"There is no profile {profile}: make figures PROFILE=NAME, NAME being one of {there}."
        )
    if rest == ["--record"]:
        return record(profile)
    # commands of the same environment, whether it is activated or not
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run(profile, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
