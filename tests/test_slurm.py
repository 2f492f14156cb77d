"""The template of a Slurm job, with stand-ins for Slurm's commands: it is requeued and goes on."""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest
import services

from impala.logdir import checkpoint

ROOT = pathlib.Path(__file__).parent.parent
TEMPLATE = ROOT / "deploy/slurm/impala.sbatch"
COMMANDS = ("srun", "scancel", "scontrol", "squeue")


class Cluster:
    """Starts the template as Slurm does."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.bin = directory / "bin"
        self.bin.mkdir()
        for name in COMMANDS:
            stand_in = shlex.join([sys.executable, str(ROOT / "tests/slurm_stand_in.py"), name])
            self.program(name, f'exec {stand_in} "$@"')
        self.program("impala", f'exec {shlex.quote(sys.executable)} -m impala "$@"')

    def program(self, name: str, line: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{line}\n")
        (self.bin / name).chmod(0o755)

    @contextlib.contextmanager
    def job(
        self, number: int, *arguments: object, ntasks: int = 6, array: str = ""
    ) -> Iterator["Job"]:
        job = Job(self, number, arguments, ntasks, array)
        try:
            yield job
        finally:
            job.kill()


class Job:
    """A job that runs; `sbatch` of the template."""

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        arguments: tuple[object, ...],
        ntasks: int,
        array: str,
    ) -> None:
        self.directory = cluster.directory / f"job-{number}"
        (self.directory / "tasks").mkdir(parents=True, exist_ok=True)
        (self.directory / "state").write_text("RUNNING")
        (self.directory / "requeued").unlink(missing_ok=True)
        self.log = cluster.directory / f"job-{number}.log"
        self.environ = {
            **{key: text for key, text in os.environ.items() if not key.startswith("SLURM")},
            "PATH": f"{cluster.bin}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "SLURM_STAND_IN": str(self.directory),
            "SLURM_JOB_ID": str(number),
            "SLURM_NTASKS": str(ntasks),
            "SLURM_GPUS": "1",
            **({"SLURM_ARRAY_TASK_ID": array} if array else {}),
        }
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                ["bash", TEMPLATE, str(cluster.run), *map(str, arguments)],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> int:
        return services.end_of(self.process)

    def preempt(self) -> None:
        """As Slurm does when a pre-empted job has a grace time."""
        command = ["scancel", "--signal=TERM", self.environ["SLURM_JOB_ID"]]
        subprocess.run(command, env=self.environ, check=True)

    @property
    def is_requeued(self) -> bool:
        return (self.directory / "requeued").exists()

    def kill(self) -> None:
        """As Slurm does with what is left when the batch script has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for task in (self.directory / "tasks").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(task.name), signal.SIGKILL)
            task.unlink(missing_ok=True)


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("state", "status", "requeued"),
    [
        *(("RUNNING", 75, True), ("RUNNING", 143, True), ("CANCELLED", 75, False)),
        *(("RUNNING", 1, False), ("RUNNING", 0, False)),
    ],
)
def test_stopped_jobs_are_requeued_unless_cancelled(
    cluster: Cluster, state: str, status: int, requeued: bool
) -> None:
    """Given a learner that ends at once, and an actor that ends with it."""
    learner = f'echo {state} >"$SLURM_STAND_IN/state"; exit {status}'
    cluster.program("impala", f'if [ "$1" = learner ]; then {learner}; fi')
    with cluster.job(7, "catch", ntasks=5) as job:
        assert job.end() == status, job.log.read_text()
        assert job.is_requeued == requeued
        assert (cluster.run / "finished").exists() == (status == 0)


def test_a_job_whose_actors_cannot_play_ends(cluster: Cluster) -> None:
    learner = f"trap 'exit 75' TERM; /bin/sleep {services.WAIT:.0f} & wait"
    cluster.program("impala", f'[ "$1" = learner ] || exit 2; {learner}')
    cluster.program("sleep", "exec /bin/sleep 0.1")
    with cluster.job(7, "catch", ntasks=6) as job:
        assert job.end() == 1, job.log.read_text()
        assert not job.is_requeued
        assert "All actors have ended" in job.log.read_text()


def test_an_actor_that_cannot_play_does_not_end_the_others_job(cluster: Cluster) -> None:
    waits = f"/bin/sleep {services.WAIT:.0f} & wait"
    played = cluster.directory / "played"
    cluster.program(
        "impala",
        f"""[ "$1" = learner ] && {{ trap '/bin/sleep 2; exit 75' TERM; {waits}; }}
        [ "$SLURM_PROCID" = 0 ] || {{ touch {played}; trap 'exit 0' TERM; {waits}; }}
        [ "$SLURM_PROCID" != 0 ] || exit 65""",
    )
    cluster.program("sleep", "exec /bin/sleep 0.1")
    with cluster.job(7, "catch", ntasks=6) as job:
        services.wait_for("the other actor", played.exists)
        tasks = job.directory / "tasks"
        services.wait_for("the end of the first", lambda: len(list(tasks.iterdir())) == 2)
        job.preempt()
        assert job.end() == 75, job.log.read_text()
        assert job.is_requeued


def test_a_job_that_is_queued_again_begins_anew_once(cluster: Cluster) -> None:
    begun = cluster.run / "log/config.yaml"
    begun.parent.mkdir(parents=True)
    begun.touch()  # of an earlier run
    begins = f"exec touch {begun}"
    for then, kept in (
        ("exit 143", "--fresh --seed 7 --empty-replay"),  # killed while it loads TensorFlow
        (begins, "--fresh --seed 7 --empty-replay"),
        (begins, "--seed 7"),
    ):
        cluster.program("impala", f'[ "$1" != learner ] || {{ echo "started: $*"; {then}; }}')
        with cluster.job(7, "catch", "--fresh", "--seed", "7", "--empty-replay", ntasks=5) as job:
            assert job.end() == (143 if "143" in then else 0), job.log.read_text()
        *_, started = re.findall("started: learner catch (.*) --logdir", job.log.read_text())
        assert started == kept
    with cluster.job(7, "catch", "--fresh", ntasks=5) as job:  # no other flag
        assert job.end() == 0, job.log.read_text()


def test_a_job_that_cannot_make_its_certificate_says_why(cluster: Cluster) -> None:
    cluster.program("openssl", "echo unknown option -addext >&2; exit 1")
    with cluster.job(7, "catch", ntasks=5) as job:
        assert job.end() == 1
    assert "unknown option -addext" in job.log.read_text()
    assert "1.1.1 or newer" in job.log.read_text()


def test_a_second_job_leaves_the_run_of_the_first_alone(cluster: Cluster) -> None:
    cluster.program("impala", f'[ "$1" = actor ] || sleep {services.WAIT:.0f}')

    def is_of(number: int) -> bool:
        with contextlib.suppress(FileNotFoundError):  # while they are replaced
            job = (cluster.run / "credentials/job").read_text()
            return job == f"{number}\n" and f":2000{number}" in address.read_text()
        return False

    address = cluster.run / "address"

    with cluster.job(7, "catch", ntasks=5) as job:
        services.wait_for("credentials and address", lambda: is_of(7))
        with cluster.job(8, "catch", ntasks=5) as other:
            assert other.end() == 2
            assert f"Another job runs {cluster.run}" in other.log.read_text()
        with cluster.job(9, array="1", ntasks=1) as more:  # only actors
            assert more.end() == 0, more.log.read_text()
        assert is_of(7)
        assert job.process.poll() is None, job.log.read_text()
        # The lock is of the job, not of its steps, which Slurm may still be ending.
        job.process.kill()
        job.process.wait()
        with cluster.job(8, "catch", ntasks=5):
            services.wait_for("those of the next job", lambda: is_of(8))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_goes_on_after_its_time_limit_and_pre_emption(cluster: Cluster) -> None:
    logdir = cluster.run / "log"
    arguments = (
        *("catch", "--total-frames", 1_000_000, "--learner.log-seconds", 0.3),
        *("--learner.checkpoint-seconds", 1.0),
    )

    def wait_for_actors(job: Job, count: int) -> None:
        before = len(services.rows(logdir))
        services.wait_for_row(
            logdir,
            f"{count} actors",
            lambda row: row["actor/active"] == count and row["updates"] > 10,
            after=before,
        )
        assert job.process.poll() is None, job.log.read_text()

    # Given a job with a learner and two actors, with credentials of its own ...
    with cluster.job(7, *arguments) as job:
        wait_for_actors(job, 2)
        secrets = cluster.run / "credentials"
        assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in secrets.iterdir()} == {0o600}
        first = (secrets / "actor").read_text()
        address = (cluster.run / "address").read_text().strip()
        tls = (
            *("--security.tls-ca", secrets / "tls.crt"),
            *("--security.tls-server-name", "impala-learner"),
        )
        reader = ("--security.token-file", secrets / "reader")
        assert "actor-7-1" in services.run("status", address, *tls, *reader).stdout
        stranger = services.run("status", address, *tls)
        assert stranger.returncode == 1 and "UNAUTHENTICATED" in stranger.stderr
        # ... at its time limit, the learner leaves a checkpoint, and the job is requeued.
        job.process.terminate()
        assert job.end() == 75, job.log.read_text()
        assert job.is_requeued
    saved = checkpoint.load(logdir).counters.frames
    assert saved > 0
    before = len(services.rows(logdir))

    # It goes on from there, and an array of actors joins; it is pre-empted ...
    with cluster.job(7, *arguments) as job, cluster.job(9, array="1", ntasks=1) as more:
        wait_for_actors(job, 3)
        assert (secrets / "actor").read_text() == first
        row = services.wait_for_row(logdir, "a row of it", lambda row: True, after=before)
        assert row["frames"] >= saved
        job.preempt()
        assert job.end() == 75 and job.is_requeued
        assert "Resumed" in job.log.read_text()
        # ... and requeued. The array has waited, and ends with the run, as all others do.
        with cluster.job(7, *arguments) as job:
            assert job.end() == 0, job.log.read_text()
            assert more.end() == 0, more.log.read_text()
    assert job.log.read_text().count("Resumed") == 2
    assert checkpoint.load(logdir).counters.frames >= 1_000_000

    # Another job for the run has other credentials.
    with cluster.job(8, *arguments) as job:
        assert job.end() == 0, job.log.read_text()
    assert (secrets / "actor").read_text() != first
