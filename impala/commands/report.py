"""`impala report`: writes a page about runs."""

import dataclasses
import pathlib
import subprocess
import tempfile
from typing import TYPE_CHECKING

from impala.commands import outputs
from impala.commands.flags import Allow
from impala.commands.plot import RunsFlags
from impala.config import values
from impala.runtime.process import IMPALA

if TYPE_CHECKING:
    from impala.analysis.report import Video
    from impala.analysis.runs import Run

_VIDEO_IMAGES = 300  # 15 seconds
_VIDEO_SECONDS = 120.0  # to make it
_VIDEO_BYTES = 8 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(RunsFlags):
    """Writes a page about runs: curves, settings, speed, faults, and a video of the best agent."""

    output: pathlib.Path = pathlib.Path("report.html")
    """Output file: HTML that needs no other file and no network."""
    video: bool = True
    """Record an episode of the best agent, at most 15 seconds of it."""
    allow: Allow = ()
    """Code that may be imported for the video if the checkpoint names it, besides installed entry
    points of the group impala.components: MODULE, for what it defines, or MODULE:ATTRIBUTE."""


def report(command: Report) -> int:
    """Writes the page."""
    command.check("report")
    outputs.check(command.output)
    from impala.analysis import report, runs

    try:
        found = runs.grouped(map(runs.read, command.logdirs))
        report.check(found)
        video = _record(report.best(found), command.allow) if command.video else None
        page = report.page(found, video)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    outputs.write(command.output, page.encode())
    print(command.output)
    return 0


def _record(run: "Run", allow: tuple[str, ...]) -> "Video":
    """Has `impala record` play an agent, in a process whose time is bounded."""
    from impala.analysis.report import Video

    checkpoint = "best" if (run.logdir / "best").is_dir() else "newest"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "episode.gif")
        command = [
            *(*IMPALA, "record", str(run.logdir), "--checkpoint", checkpoint, "--greedy"),
            *("--output", str(file), "--max-frames", str(_VIDEO_IMAGES)),
            *(word for name in allow for word in ("--allow", name)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_VIDEO_SECONDS)
        except subprocess.TimeoutExpired:
            return Video(f"{run.logdir} was not recorded within {_VIDEO_SECONDS:.0f} seconds.")
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            return Video("".join(last) or f"impala record ended with status {done.returncode}.")
        if (size := file.stat().st_size) > _VIDEO_BYTES:
            return Video(f"it has {size / 2**20:.0f} MB; impala record {run.logdir} makes it.")
        played = done.stdout.strip().rpartition(": ")[2]  # how many images, which return
        return Video(f"{run.logdir}, checkpoint {checkpoint}, greedy: {played}", file.read_bytes())
