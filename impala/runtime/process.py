"""Settings of a process: memory allocation, open files, devices and threads.

Call these functions before the first tensor is made; `tune_malloc`, `prefer_onednn` and `hide_gpus`
before TensorFlow is imported. Only those that need TensorFlow import it.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import math
import os
import pathlib
import platform
import resource
import select
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

# glibc's mallopt parameters (malloc.h). These values keep the pages of megabyte messages instead of
# returning them to the kernel and faulting them in again: 4 MB protobuf fields become 4-5 times
# faster. One arena, because memory that one thread allocates and another frees would fill the
# arenas of all threads in turn, and a learner's memory would grow by megabytes a minute.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MALLOC_OPTIONS = {
    _M_ARENA_MAX: 2,
    _M_MMAP_THRESHOLD: 1 << 30,
    _M_TRIM_THRESHOLD: 2**31 - 1,
    _M_TOP_PAD: 64 << 20,
}

_STALLED_SECONDS = 5.0  # for which a full terminal or pipe may hold up who writes to it
_redirecting = threading.Lock()  # held by the thread that has redirected standard error
_X86 = ("x86_64", "AMD64")
_uses_bfloat16 = False

IMPALA = (sys.executable, "-P", "-m", "impala")
"""Starts the `impala` command as a child. -P: the working directory is not first on Python's path,
so a user's modules cannot hide ours."""


def tune_malloc() -> None:
    """Makes large messages cheap to allocate. Does nothing without glibc."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in _MALLOC_OPTIONS.items():
        mallopt(option, value)


def allow_many_files() -> None:
    """Raises the limit of open files to the maximum: every connection needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def outlive_readers(*, waits: bool = True) -> None:
    """Drops what is written to standard output and error when it cannot be written.

    After a terminal was closed, a pipe's reader has ended or a disk is full, text is lost instead
    of the run ending without its checkpoint.

    Args:
      waits: without end for a stopped terminal or an unread pipe, such as a pager's. False: text is
        lost after five seconds, until some is read.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout, waits), _outliving(sys.stderr, waits)


def leave(status: int) -> NoReturn:
    """Ends the process as `sys.exit` does, but leaves its threads alone.

    The interpreter's shutdown ends a daemon thread wherever it is. In C++ code, such as
    TensorFlow's, that aborts the process with another status.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it cannot be written, or is closed
            stream.flush()
    os._exit(status)


WRITERS, COMPILER = ("telemetry", "evaluations"), "xla"
"""Names of threads that may run for long when a run has ended."""


def ended(status: int) -> int:
    """Returns an exit status, or ends with it where a thread that may hang would be waited for."""
    if any(thread.name in (*WRITERS, COMPILER) for thread in threading.enumerate()):
        leave(status)
    return status


class _Outliving(io.FileIO):
    """A file that drops what cannot be written, or not soon."""

    _is_stalled = False

    def write(self, data: Any) -> int:
        written: int | None = None
        with contextlib.suppress(OSError):
            end = time.monotonic() + (0.0 if self._is_stalled else _STALLED_SECONDS)
            while (written := super().write(data)) is None and (left := end - time.monotonic()) > 0:
                room = select.poll()
                room.register(self, select.POLLOUT)
                room.poll(1000.0 * left)  # others may take it first
            self._is_stalled = written is None
        return len(memoryview(data).cast("B")) if written is None else written


def _outliving(stream: TextIO, waits: bool) -> TextIO:
    """Returns the stream on an `_Outliving`; unchanged if it is not a file, as in tests.

    What its encoding does not have is escaped.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    number = stream.fileno()
    if not waits and not os.path.isfile(f"/dev/fd/{number}"):  # a terminal or a pipe
        with contextlib.suppress(OSError):  # a socket
            # Opened anew, as other programs share the flags of what there was; it stays open.
            number = os.open(f"/dev/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def bound_numpy_threads() -> None:
    """Makes NumPy multiply matrices in one thread, unless the user has chosen otherwise.

    Those of an actor are small, and its cores belong to environments and to other actors. It has
    no effect once NumPy has been imported.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def prefer_onednn() -> None:
    """Makes TensorFlow use oneDNN on every x86 CPU, unless the user has chosen otherwise.

    Left to itself it does so only on CPUs with AVX-512 VNNI or newer; on one with AVX2, an update
    of the preset `atari` then takes 2.3 times as long (docs/performance.md). It has no
    effect once TensorFlow has been imported.
    """
    if platform.machine() in _X86:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def load_cusolver() -> None:
    """Loads cuSOLVER from the wheel that TensorFlow's extra `and-cuda` installs, if it is there.

    TensorFlow 2.21 looks for CUDA's libraries in their wheels, but not for this one; without it,
    TensorFlow uses no GPU. What is loaded already it finds by its name.
    """
    spec = importlib.util.find_spec("nvidia")
    for directory in (spec and spec.submodule_search_locations) or ():
        for library in pathlib.Path(directory, "cusolver", "lib").glob("libcusolver.so.*"):
            with contextlib.suppress(OSError):  # TensorFlow says what it misses
                ctypes.CDLL(str(library))


def load_tensorflow(use_gpus: bool, *, is_guest: bool = False) -> None:
    """Imports TensorFlow and initialises its devices, without its messages.

    No log level suppresses them, and they are not JSON. They are printed if the import fails, or if
    TensorFlow does not find an existing NVIDIA GPU that it may use.

    Args:
      use_gpus: if false, GPUs are hidden from TensorFlow.
      is_guest: whether the process is a user's program, whose other libraries and child processes
        keep the GPUs, and which may have used TensorFlow already.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    prefer_onednn()
    flags = _cpu_flags()
    if flags and "avx" not in flags and platform.machine() in _X86:
        raise ImportError(
            "TensorFlow needs a CPU with AVX. This one has none, or the virtual machine hides it: "
            "give the machine the CPU model of its host."
        )
    with _redirecting:
        _load_tensorflow(use_gpus, is_guest)


def _load_tensorflow(use_gpus: bool, is_guest: bool) -> None:
    expected = use_gpus and has_gpu()
    sys.stderr.flush()
    stderr = os.dup(2)
    well = False
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        # Python's own may be another one (`outlive_readers`).
        own = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
        try:
            with (
                contextlib.redirect_stderr(own),
                _without_garbage_collection(),
                _without_keras(is_guest),
            ):
                if not use_gpus and not is_guest:
                    hide_gpus()
                import tensorflow as tf

            if use_gpus:
                load_cusolver()
            if not use_gpus and is_guest:
                with contextlib.suppress(RuntimeError):  # TensorFlow uses them already
                    tf.config.set_visible_devices([], "GPU")

            well = bool(tf.config.list_physical_devices("GPU")) or not expected
        except (KeyboardInterrupt, SystemExit):  # a signal, not an error of TensorFlow
            well = True
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if not well:
                said.seek(0)
                sys.stderr.write(said.read().decode(errors="replace"))


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Spares an import of thousands of modules a sixth of its time; its objects stay anyway."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _without_keras(is_guest: bool) -> Iterator[None]:
    """Spares the import of Keras, a third of TensorFlow's; it is imported when it is used.

    TensorFlow tries to import it at its end, and goes on without it. A guest may need it.
    """
    if is_guest or "keras" in sys.modules or "tensorflow" in sys.modules:
        yield
        return
    sys.modules["keras.src"] = None  # type: ignore[assignment]  # an ImportError
    try:
        yield
    finally:
        del sys.modules["keras.src"]


def hide_gpus() -> None:
    """Hides the GPUs, which belong to the learner, from this process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")


def set_threads(intra_op: int, inter_op: int = 1) -> None:
    """Limits TensorFlow's threads. Raises RuntimeError if it already runs with other limits."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(intra_op)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)


def use_bfloat16(wanted: bool = True, *, on_gpu: bool = False) -> bool:
    """Has torsos of standardised images compute in bfloat16 from now on, where that is faster.

    All else stays float32.

    It is faster on GPUs, on CPUs with AMX, and on AMD's with AVX-512 BF16. On Intel's without AMX
    an update of `atari` takes 1.4 times as long as in float32 (docs/performance.md).

    Args:
      wanted: False: in float32.
      on_gpu: whether torsos are on a GPU.

    Returns:
      Whether they compute in bfloat16.
    """
    global _uses_bfloat16
    flags = _cpu_flags()
    is_faster = on_gpu or "amx_bf16" in flags or {"avx512_bf16", "AuthenticAMD"} <= flags
    _uses_bfloat16 = wanted and is_faster
    return _uses_bfloat16


def uses_bfloat16() -> bool:
    """Returns whether `use_bfloat16` was called and had an effect."""
    return _uses_bfloat16


def _cpu_flags() -> set[str]:
    """Returns the CPU's features, with other words; empty if they are not known."""
    try:
        return set(pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return set()


def has_gpu() -> bool:
    """Returns whether the host has an NVIDIA GPU that this process may see."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return not is_hidden and pathlib.Path("/dev/nvidiactl").exists()


def available_cores() -> int:
    """Returns the cores that this process may use, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, math.ceil(_cgroup_cores())))


def memory() -> int:
    """Returns the bytes of memory that this process may use: the host's, or its cgroup's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for directory in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, v1
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((directory / name).read_text()))
    return min(limits)


def replay_memory(setting: int) -> int:
    """Returns the bytes that replay may use: `replay.memory`, or a quarter of the memory if 0."""
    return setting or memory() // 4


def _cgroup_cores() -> float:
    """Returns the CPU quota (cgroup v2, then v1) in cores; 2^31 if there is none."""
    limits = [float(2**31)]
    for directory in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (directory / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))  # which is no number if it is "max"
        with contextlib.suppress(OSError):
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
            if quota != "-1":
                limits.append(int(quota) / int(period))
    return min(limits)


_CGROUPS, _OWN_CGROUPS = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")


def _cgroups(controller: str) -> Iterator[pathlib.Path]:
    """Yields the directories whose limits hold for this process: its cgroup and those above it.

    A container has its own at the root; a Slurm step or a unit of systemd has it further down.
    """
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    yield from (_CGROUPS, _CGROUPS / controller)  # v2, v1
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        place = _CGROUPS / controller if controllers else _CGROUPS
        for part in pathlib.PurePath(path).parts[1:]:
            place /= part
            yield place
