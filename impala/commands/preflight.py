"""Checks before a run starts and before TensorFlow is loaded, with errors of one line.

Import this only when a run starts: it loads Gymnasium, which help does not need.
"""

import pathlib

from impala import environments
from impala.commands.flags import RunFlags
from impala.config import values
from impala.logdir import checkpoint, identity
from impala.logdir.directory import LogDirectory, LogDirectoryError, StorageError
from impala.schedule import tasks


def log_directory(command: RunFlags) -> pathlib.Path:
    """Checks that a run can start. Returns its log directory, which exists then.

    Raises:
      OptionError: there is no such environment; the log directory cannot be written, is used by
        another learner, or holds another experiment; or there is nothing to initialise from, or
        no teacher.
    """
    settings = command.settings
    try:
        for task in tasks.make(settings.environment, settings.tasks):
            environments.check(task.environment.id)
        logdir = command.logdir or identity.default(command.preset, settings)
        with LogDirectory(logdir):
            if not (command.fresh or command.change_settings):
                identity.check(logdir, settings)
        if command.fresh or not checkpoint.exists(logdir):
            for other in (command.init_from, *settings.teacher.logdirs):
                if other is not None:
                    checkpoint.load(pathlib.Path(other))
    except (LogDirectoryError, StorageError, ValueError) as error:
        raise values.OptionError(str(error)) from error
    return logdir
