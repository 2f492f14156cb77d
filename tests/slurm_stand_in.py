"""Stand-ins for Slurm's commands on one host: COMMAND ARGUMENTS, for a job in a directory.

What they do was seen of Slurm 22.05: a step is ended by a signal to its tasks, while SIGTERM to
srun kills them; what is requeued is started again by who plays the controller.
"""

import os
import pathlib
import signal
import subprocess
import sys
from types import FrameType

JOB = pathlib.Path(os.environ["SLURM_STAND_IN"])  # has `state`, `tasks/PID`, `requeued`
SRUN = ("--ntasks", "--nodes", "--cpus-per-task", "--exact", "--kill-on-bad-exit", "--gres")


def srun(arguments: list[str]) -> int:
    """Starts the tasks of a step, waits for them, and returns the largest exit status."""
    options = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        assert name in SRUN, name
        options[name] = value
    if "--kill-on-bad-exit" in options:  # of actors, which would wait for the job's GPU
        assert options.get("--gres") == "none" and "SLURM_GPUS" not in os.environ
    tasks = []
    for rank in range(int(options.get("--ntasks", os.environ["SLURM_NTASKS"]))):
        environ = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": "localhost"}
        task = subprocess.Popen(arguments, env={**os.environ, **environ}, start_new_session=True)
        (JOB / "tasks" / str(task.pid)).touch()
        tasks.append(task)

    def kill(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            os.killpg(task.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    statuses = []
    for task in tasks:
        status = task.wait()
        (JOB / "tasks" / str(task.pid)).unlink()
        statuses.append(128 - status if status < 0 else status)
    return max(statuses)


def scancel(arguments: list[str]) -> int:
    """Signals all processes of all tasks."""
    option, job = arguments
    assert option == "--signal=TERM" and job == os.environ["SLURM_JOB_ID"]
    for task in (JOB / "tasks").iterdir():
        os.killpg(int(task.name), signal.SIGTERM)
    return 0


def scontrol(arguments: list[str]) -> int:
    """Asks for another start of the job."""
    assert arguments == ["requeue", os.environ["SLURM_JOB_ID"]]
    (JOB / "requeued").touch()
    return 0


def squeue(arguments: list[str]) -> int:
    """Prints the job's state."""
    assert arguments == ["--noheader", "--job", os.environ["SLURM_JOB_ID"], "--format", "%T"]
    print((JOB / "state").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
