"""The executable policy of a run, made by a process of its own when it is first asked for."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from impala.config import values
from impala.config.schema import Config
from impala.environments import spaces
from impala.environments.spaces import Spaces
from impala.parts import sections
from learner.fleet.refusals import NotOffered, Unavailable

_log = logging.getLogger(__name__)

_SECONDS = 300.0  # that making it may take; a large network on a busy machine takes half a minute
_REFUSED = 3  # exit status of impala.play.policy_graph


class Executable(NamedTuple):
    """An executable policy."""

    digest: str  # SHA-256
    onnx: bytes


class ExecutablePolicy:
    """Makes the executable policy of a run once. Of one event loop.

    Args:
      config: of the run.
      played: the spaces that are common to its tasks.
    """

    def __init__(self, config: Config, played: Spaces) -> None:
        self._config = config
        self._spaces = played
        self._making: asyncio.Future[Executable] | None = None
        self._unmade = ""  # why there is none; an exception that is raised again would grow
        # Not the loop's own threads, for which it would wait at its end.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="executable")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def get(self) -> Executable:
        """Returns the executable policy, which takes seconds when it is asked for first.

        Raises:
          NotOffered: there is none.
          Unavailable: it could not be made this time.
        """
        if self._unmade:
            raise NotOffered(self._unmade)
        if self._making is None:
            self._making = asyncio.get_running_loop().run_in_executor(self._thread, self._made)
            self._making.add_done_callback(self._forget_failure)
        return await asyncio.shield(self._making)  # the other callers wait on

    def _forget_failure(self, made: asyncio.Future[Executable]) -> None:
        if made.cancelled() or made.exception() is not None:
            self._making = None

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.shutdown()

    def _made(self) -> Executable:
        began = time.monotonic()
        _log.info("Making the executable policy, which an actor asks for ...")
        request = {
            "config": values.to_dict(self._config),
            "allow": sections.allowed(self._config).names,
            "spaces": [spaces.to_dict(space) for space in self._spaces],
        }
        with tempfile.TemporaryDirectory(prefix="impala-") as directory:
            output = pathlib.Path(directory) / "policy.onnx"
            status, said = self._run(json.dumps(request).encode(), output)
            if status == 0:
                onnx = output.read_bytes()
                made = Executable(hashlib.sha256(onnx).hexdigest(), onnx)
                seconds = time.monotonic() - began
                _log.info("Made the executable policy in %.0f s, %d bytes.", seconds, len(onnx))
                return made
            why = output.read_text("utf-8") if status == _REFUSED else said
        _log.warning("There is no executable policy: %s", why)
        if status < 0:  # killed, such as for its memory: another time it may be made
            raise Unavailable(f"The executable policy was not made. {why} Ask for it again later.")
        self._unmade = (
            f"This learner has no executable policy. {why} It was tried at the learner: mend that "
            "there and start it again, or act with parameters, as other actors do."
        )
        raise NotOffered(self._unmade)

    def _run(self, request: bytes, output: pathlib.Path) -> tuple[int, str]:
        """Returns the process's status, and what it said last."""
        ours = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-P", "-m", "impala.play.policy_graph", str(output)]
        with self._lock:
            if self._closed:
                raise NotOffered("The learner is stopping.")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **ours},
            )
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)  # the update comes first
        try:
            _, said = self._process.communicate(request, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return -1, f"Making it took more than {_SECONDS:.0f} s."
        lines = said.decode(errors="replace").strip().splitlines()
        return self._process.returncode, lines[-1][-300:] if lines else "Its process was killed."
