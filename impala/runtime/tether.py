"""Ties a child process to its parent: it gets a signal when the parent dies (Linux).

Run as a program, this file asks the kernel for that and then becomes the child. The `preexec_fn` of
`subprocess.Popen` could ask, too, but then Python starts the child with fork(), and in a process
that uses gRPC one in twenty such children aborted. Otherwise it uses vfork().
"""

import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """Returns the command that runs another one until that ends or this process does.

    Args:
      command: a program and its arguments.
      number: the signal that it gets when this process dies.

    Raises:
      FileNotFoundError: there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, "No such program", command[0])
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def tie(parent: int, number: int = signal.SIGTERM) -> None:
    """Ties this process to its parent. Raises SystemExit if that has died already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(1)


def _become(command: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    tie(int(sys.argv[1]), int(sys.argv[2]))
    _become(sys.argv[3:])
