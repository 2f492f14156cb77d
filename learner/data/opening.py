"""Opens the replay of a run and compares it with the checkpoint's count."""

import functools
import logging

from impala.config.schema import Config
from impala.logdir.directory import LogDirectory, StorageError
from impala.runtime import process
from impala.types import Unroll
from learner.data.ingest import wire_specs
from learner.data.replay import Replay
from learner.data.rows import Layout
from learner.data.storage import Disk
from protos import codec

_log = logging.getLogger(__name__)


def open_replay(
    config: Config,
    unroll_spec: Unroll,
    layout: Layout,
    directory: LogDirectory,
    counted: int,
    may_be_lost: bool,
) -> Replay | None:
    """Opens the replay, if the mix uses it.

    Args:
      config: the run's configuration.
      unroll_spec: a nest of ArraySpec of one environment.
      layout: of its row.
      directory: holds the replay, if it is on disk.
      counted: unrolls added to it according to the checkpoint. After a crash it may hold more.
      may_be_lost: whether fewer are accepted: the user has asked for an empty replay.

    Raises:
      StorageError: it is missing or damaged, or does not fit the run.
    """
    if not config.mix.replayed:
        return None
    replay = Replay(
        layout,
        _disk(config, unroll_spec, directory, counted),
        config.replay.rule,
        capacity_frames=config.replay.capacity_frames,
        memory=process.replay_memory(config.replay.memory),
        seed=config.seed,
    )
    added = replay.contents().added
    _log.info("Replay holds %s of %s unrolls.", f"{len(replay):,}", f"{added:,}")
    if added < counted:
        found = f"The checkpoint counts {counted:,} unrolls added to replay, found are {added:,}."
        if not may_be_lost and config.replay.storage == "disk":
            replay.close()
            raise StorageError(
                f"{found} Restore {directory.replay}, or go on with an empty one with "
                "--empty-replay."
            )
        _log.warning("%s Going on with those.", found)
    return replay


def _disk(
    config: Config, unroll_spec: Unroll, directory: LogDirectory, counted: int
) -> Disk | None:
    if config.replay.storage != "disk":
        return None
    specs, _ = wire_specs(unroll_spec)
    identity = f"rule {config.replay.rule}, rows of unrolls {codec.fingerprint(specs, (), '')}"
    move_aside = functools.partial(directory.move_replay_aside, "damaged")
    return Disk(directory.replay, identity, move_aside, counted)
