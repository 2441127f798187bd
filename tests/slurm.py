"""The batch on a real Slurm, controller and node on this machine: `make slurm`, or `make slurm
PROFILE=short`.

Every notebook is a job; one is killed while it runs and has to be retried; the figures have to be
those of a local run. Both runs start from nothing, in build/slurm/. The daemons are Debian's, with
ports, keys and folders of their own, and end with the run.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import batches
import yaml

TIMED = [
    "25_efficiency*",
    "26_comparison*",
    "index.html",
    "here",
]  # seconds differ from run to run: in these notebooks, and where the page quotes them

CONFIGURATION = """\
ClusterName=cats
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={home}/munge.socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
# no cgroups, so that it runs in a container; no database, so that finished jobs have to be
# remembered for the whole run
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=86400
# cores are shared out, memory is not: what jobs ask for is meant for a cluster's nodes and may be
# more than there is here
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000000
PartitionName=all Nodes={host} Default=YES State=UP
"""


def run(*command, **options):
    """What a command prints; its failure is ours."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **options).stdout


def until(what, check, seconds=60):
    """Wait for `check` to be true."""
    end = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > end:
            sys.exit(f"slurm: {what} took more than {seconds} s")
        time.sleep(0.5)
    return found


@contextmanager
def daemon(home, *command):
    """A daemon in the foreground, its output in home/NAME.log; ended when we are."""
    name = Path(command[0]).name
    with open(home / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def free_ports(n):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def slurm(cores):
    """A cluster of one node; SLURM_CONF tells every Slurm command about it."""
    host = socket.gethostname().split(".")[0]
    home = Path(tempfile.mkdtemp(prefix="cats-slurm-"))
    home.chmod(0o755)  # munge wants its socket to be within reach of everybody
    key, conf = home / "munge.key", home / "slurm.conf"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    conf.write_text(
        CONFIGURATION.format(
            host=host, user=getpass.getuser(), ports=free_ports(2), home=home, cores=cores
        )
    )
    os.environ["SLURM_CONF"] = str(conf)
    # inside a job the executor keeps only the SLURM_ variables that it knows, and its srun would
    # look for a cluster's own slurm.conf
    srun = home / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    os.environ["PATH"] = f"{srun.parent}:{os.environ['PATH']}"
    files = [f"--{name}={home}/munge.{name}" for name in ("socket", "pid-file", "seed-file")]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        try:
            stack.enter_context(daemon(home, "munged", "--foreground", f"--key-file={key}", *files))
            until("munged", (home / "munge.socket").exists)
            stack.enter_context(daemon(home, "slurmctld", "-D", "-f", str(conf)))
            stack.enter_context(daemon(home, "slurmd", "-D", "-f", str(conf), "-N", host))
            until(
                "the node",
                lambda: (
                    "idle"
                    in subprocess.run(
                        ["sinfo", "-h", "-o", "%t"], capture_output=True, text=True
                    ).stdout
                ),
            )
        except SystemExit:
            for log in sorted(home.glob("*.log")):
                print(f"--- {log.name}", log.read_text()[-3000:], sep="\n", file=sys.stderr)
            raise
        try:
            yield
        finally:
            run("scancel", "--user", getpass.getuser())
            until("ending the jobs", lambda: not run("squeue", "-h"), 120)


def jobs():
    """Every job so far: number -> (state, the rule and wildcards it is for)."""
    lines = run("squeue", "-h", "--states=all", "-o", "%i|%T|%k").splitlines()
    return {number: (state, rule) for number, state, rule in (line.split("|") for line in lines)}


@contextmanager
def batch(folder, profile, *options):
    """The batch, started in a copy of what it reads; what still runs of it when we are done is
    killed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    batches.copy(folder, "cats", "data", "notebooks", "Snakefile")
    process = batches.start(
        folder,
        f"notebooks/profiles/{profile}.yaml",
        "--quiet",
        "rules",
        *options,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def victim(folder):
    """A job that is in the middle of its notebook: papermill has saved some of it."""
    begun = {path.name.split(".")[0] for path in folder.glob("build/**/*.running.ipynb")}
    for number, (state, rule) in jobs().items():
        if state == "RUNNING" and any(name in rule for name in begun):
            return number, rule


def on_cluster(folder, profile):
    """Run the batch as jobs and kill one; returns what is wrong."""
    # there is no accounting database to ask about jobs, and no need to ask as seldom as a real
    # controller would like
    options = ["--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "5"]
    killed = None
    with batch(folder, profile, "--profile", "notebooks/profiles/slurm", *options) as process:
        while process.poll() is None:
            if not killed and (killed := victim(folder)):
                run("scancel", killed[0])
                print(f"slurm: killed job {killed[0]}, {killed[1]}", flush=True)
            time.sleep(1)
    done = jobs()
    for number, (state, rule) in done.items():
        print(f"slurm: job {number} {state.lower()}, {rule}")
    if process.returncode:
        return "the batch failed on the cluster"
    if not killed or done[killed[0]][0] != "CANCELLED":
        return "no job could be killed"
    if ("COMPLETED", killed[1]) not in done.values():
        return "the killed job was not retried"


def made(folder, profile):
    """Everything in the figures folder that does not hold seconds: name -> bytes."""
    figures = folder / yaml.safe_load(
        (batches.ROOT / f"notebooks/profiles/{profile}.yaml").read_text()
    ).get("figures", "figures")
    return {
        path.name: path.read_bytes()
        for path in sorted(figures.iterdir())
        if not any(path.match(name) for name in TIMED)
    }


def main(profile="demo"):
    missing = [
        name
        for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun")
        if not shutil.which(name)
    ]
    if missing:
        sys.exit(
            f"slurm: no {', '.join(missing)} here. On Debian or Ubuntu: apt-get install slurm-wlm"
            " munge"
        )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("slurm: ended")
    )  # as an error would, so that the daemons end too
    cores = len(os.sched_getaffinity(0))
    cluster, local = (batches.ROOT / "build/slurm" / name for name in ("cluster", "local"))
    with slurm(cores):
        if wrong := on_cluster(cluster, profile):
            sys.exit(f"slurm: {wrong}")
    with batch(local, profile, "--cores", str(cores)) as process:
        if process.wait():
            sys.exit("slurm: the batch failed locally")
    ours, theirs = made(cluster, profile), made(local, profile)
    different = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    print(
        f"slurm: {len(theirs)} files in figures/, without {' and '.join(TIMED)}, which hold"
        f" seconds; different: {', '.join(different) or 'none'}"
    )
    return bool(different) or not theirs


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
