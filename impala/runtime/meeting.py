"""A meeting of processes on several hosts: they wait for each other, exchange data, notice deaths.

The first process listens and the others dial it. Both sides send lines of JSON, and an empty line
every second. A process that ends, or is silent for ten seconds, ends the meeting for all of them.
"""

import contextlib
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from impala.runtime import listen

_log = logging.getLogger(__name__)

_PULSE_SECONDS = 1.0
_SILENT_SECONDS = 10.0  # after which a process counts as dead
# The same until the first exchange: TensorFlow connects before it, and stops all threads meanwhile.
_PATIENT_SECONDS = 75.0
_LOOK_SECONDS = 0.2
_REMIND_SECONDS = 60.0  # between two messages that others are waited for
_END_SECONDS = 5.0  # for this process to end by itself when another one is lost
# Of a line: of what anybody may say at first, and of what is exchanged, such as moments of images.
_MOST_AT_FIRST, _MOST_BYTES = 1 << 20, 1 << 30
_BYE = "bye"


class PeerLost(RuntimeError):
    """Another process has ended or does not answer: this one cannot go on without it."""


class Refused(ValueError):
    """The first process does not accept this one; the message explains why."""


class Meeting:
    """What one process has of a meeting. Only one thread may call its methods."""

    def __init__(
        self,
        addresses: Sequence[str],
        own: int,
        facts: Mapping[str, Any],
        end: Callable[[], None] = lambda: os._exit(os.EX_TEMPFAIL),
    ):
        """Takes what the processes have to know of each other; `begin` connects them.

        Args:
          addresses: HOST:PORT of each process. The first one's port is free again when all are
            here.
          own: which of them this process is.
          facts: data for JSON that has to be equal in all of them.
          end: called, from another thread, if this process has not closed the meeting some seconds
            after another one is lost: it may be stuck in a call that waits for that one.
        """
        self._addresses = addresses
        self.own = own
        """Which of the processes this one is, from 0."""
        self.count = len(addresses)
        self._facts = json.loads(json.dumps(facts))
        self._end = end
        self._others: dict[int, _Connection] = {}  # of the first: all others; of these: the first
        self._is_over = threading.Event()
        self._has_lost = threading.Event()

    def begin(self, until: Callable[[], bool]) -> bool:
        """Waits until all are here (a rendezvous).

        Args:
            until: called often; ends the wait if it returns True.

        Returns:
            Whether all are here.

        Raises:
            Refused: the facts differ from those of the first.
            OSError: the first cannot listen on its port.
        PeerLost: one that was here has ended.
        """
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        is_complete = self._listen(until) if self.own == 0 else self._dial(until)
        for each in self._others.values():
            each.on_loss = self._lose
            if each.is_over and is_complete:
                raise PeerLost(f"{each.name} is lost")
        return is_complete

    def meet(self, own: Any) -> list[Any]:
        """Exchanges data, when all processes have called this (an all-gather).

        Args:
          own: data for JSON.

        Returns:
          That of each process, in their order; the same everywhere.

        Raises:
          PeerLost: a process is gone.
        """
        for other in self._others.values():
            other.be_patient(_SILENT_SECONDS)
        if self.own:
            self._others[0].send(own)
            found: list[Any] = self._others[0].receive()
            return found
        each = [own, *(self._others[i].receive() for i in sorted(self._others))]
        for other in self._others.values():
            other.send(each)
        found = json.loads(json.dumps(each))
        return found

    def await_loss(self, seconds: float) -> bool:
        """Returns whether a process is lost, at once or in the next seconds."""
        return self._has_lost.wait(seconds)

    def part(self) -> None:
        """Ends the meeting when all want to: from now on, nobody has to be there."""
        for other in self._others.values():
            with contextlib.suppress(PeerLost):
                other.send(_BYE)
        for other in self._others.values():
            other.await_end(_SILENT_SECONDS)
        self.close()

    def close(self) -> None:
        """Leaves at once. If the others have not parted, they end, too."""
        self._is_over.set()
        for other in self._others.values():
            other.close()

    def _listen(self, until: Callable[[], bool]) -> bool:
        here: dict[int, _Connection] = {}
        port = int(self._addresses[0].rpartition(":")[2])
        reminded = time.monotonic()
        server = listen.bind("The first peer", f"0.0.0.0:{port}")
        with server:
            server.settimeout(_LOOK_SECONDS)
            while len(here) < len(self._addresses) - 1:
                if until():
                    return False
                here = {i: each for i, each in here.items() if not each.is_over}
                self._others = dict(here)  # they get pulses
                if time.monotonic() > reminded + _REMIND_SECONDS:
                    reminded = time.monotonic()
                    _log.info(
                        "Waiting for %s.",
                        ", ".join(a for i, a in enumerate(self._addresses) if i and i not in here),
                    )
                with contextlib.suppress(TimeoutError):
                    self._admit(_Connection(server.accept()[0]), here)
        self._others = dict(here)
        for each in here.values():
            each.send("go")  # who is gone already is noticed at once
        return True

    def _admit(self, caller: "_Connection", here: "dict[int, _Connection]") -> None:
        try:
            index, facts = caller.receive(_SILENT_SECONDS)
            if type(index) is not int or not 0 < index < len(self._addresses):
                raise ValueError
            if not isinstance(facts, dict):
                raise TypeError
        except (PeerLost, TypeError, ValueError, queue.Empty):  # a scan of ports, for instance
            caller.close()
            return
        caller.name = self._addresses[index]
        for name in dict.fromkeys([*self._facts, *facts]):
            ours, theirs = self._facts.get(name), facts.get(name)
            if ours != theirs:
                why = f"{name} is {theirs!r} at {caller.name}, but {ours!r} at the first peer"
                _log.warning("Refused: %s.", why)
                with contextlib.suppress(PeerLost):
                    caller.send(f"{why}. Start all peers with the same settings.")
                caller.close()
                return
        if index in here:  # it has been started again
            here[index].close()
        here[index] = caller

    def _dial(self, until: Callable[[], bool]) -> bool:
        host, _, port = self._addresses[0].rpartition(":")
        reminded = time.monotonic()
        while not until():
            if time.monotonic() > reminded + _REMIND_SECONDS:
                reminded = time.monotonic()
                _log.info("Waiting for %s.", self._addresses[0])
            try:
                dialled = socket.create_connection((host.strip("[]"), int(port)), timeout=2.0)
                first = _Connection(dialled)
            except OSError:
                time.sleep(_LOOK_SECONDS)
                continue
            first.name = self._addresses[0]
            self._others = {0: first}
            with contextlib.suppress(PeerLost):
                first.send([self.own, self._facts])
                answer = None
                while answer is None and not until():
                    with contextlib.suppress(queue.Empty):
                        answer = first.receive(_LOOK_SECONDS)
                if answer == "go":
                    return True
                if isinstance(answer, str):
                    raise Refused(answer)
            first.close()
            time.sleep(_LOOK_SECONDS)  # it may be one of the run before that is about to end
        return False

    def _pulse(self) -> None:
        while not self._is_over.wait(_PULSE_SECONDS):
            for other in list(self._others.values()):
                other.pulse()

    def _lose(self, why: str) -> None:
        if self._is_over.is_set():
            return
        self._has_lost.set()
        _log.error("%s: this process ends, too, and has to be started again.", why)
        for other in self._others.values():
            other.close()
        if not self._is_over.wait(_END_SECONDS):
            self._end()


class _Connection:
    """A socket to another process, read by a thread."""

    def __init__(self, connected: socket.socket):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(_PATIENT_SECONDS)
        self._patience = _PATIENT_SECONDS
        self.name = "a peer"
        self.on_loss: Callable[[str], None] = lambda why: None
        """Called by the thread if the connection ends without a farewell."""
        self._socket = connected
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._read, name="peer", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether nothing comes any more."""
        return self._ended.is_set()

    def be_patient(self, seconds: float) -> None:
        """Sets for how long the other side may be silent from now on."""
        if seconds != self._patience:
            self._patience = seconds
            with contextlib.suppress(OSError):  # it has been closed
                self._socket.settimeout(seconds)

    def send(self, data: Any) -> None:
        """Sends data for JSON.

        Raises:
          PeerLost: the connection has ended.
        """
        try:
            self._send(json.dumps(data).encode() + b"\n")
        except OSError as error:
            raise PeerLost(f"{self.name} is lost ({error})") from error

    def pulse(self) -> None:
        """Shows the other side that this process lives (a heartbeat)."""
        with contextlib.suppress(OSError):
            self._send(b"\n")

    def receive(self, seconds: float | None = None) -> Any:
        """Returns the next data, when it is there.

        Raises:
          PeerLost: the connection has ended.
          queue.Empty: nothing came for `seconds`.
        """
        data = self._received.get(timeout=seconds)
        if isinstance(data, PeerLost):
            self._received.put(data)  # whoever asks again
            raise data
        return data

    def await_end(self, seconds: float) -> None:
        """Returns when the other side has said farewell or is gone."""
        self._ended.wait(seconds)

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, line: bytes) -> None:
        with self._lock:
            self._socket.sendall(line)

    def _read(self) -> None:
        why, most = "it has ended", _MOST_AT_FIRST
        try:
            with self._socket.makefile("rb") as file:
                while line := file.readline(most):
                    if line == b"\n":
                        continue
                    most = _MOST_BYTES
                    if (data := json.loads(line)) == _BYE:
                        self._received.put(PeerLost(f"{self.name} has left"))
                        self._ended.set()
                        return
                    self._received.put(data)
        except TimeoutError:
            why = f"silent for {self._patience:.0f} s"
        except OSError as error:
            why = str(error)
        except (ValueError, RecursionError):
            why = "what it says is no JSON"
        why = f"{self.name} is lost ({why})"
        self._received.put(PeerLost(why))
        self._ended.set()
        self.on_loss(why)
