"""HTTP/2 written by hand, from another host than that of the good callers: shared by tests."""

import socket
import struct
from typing import Self

from services import WAIT

ELSEWHERE = "127.0.0.2"  # another host, as far as the learner sees

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8  # frames
END_STREAM, END_HEADERS = 1, 4  # flags
INITIAL_WINDOW_SIZE = 4  # a setting
LARGEST_FRAME = 16_384


def connect(address: str, source: str = ELSEWHERE) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT, source_address=(source, 0))


class Raw:
    """HTTP/2 by hand, for what gRPC's own client is too polite to do.

    Args:
      address: of the learner.
      window: bytes that the learner may send on a stream before it is told to go on.
    """

    def __init__(self, address: str, window: int = 65_535) -> None:
        self._socket = connect(address)
        self._answers = self._socket.makefile("rb")
        self._last_stream = -1
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.close()

    def call(self, method: str) -> int:
        """Begins a call, and returns its stream without having said what is wanted."""
        self._last_stream += 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "learner",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        literals = (b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._send(HEADERS, END_HEADERS, self._last_stream, b"".join(literals))
        return self._last_stream

    def say(self, stream: int, data: bytes, flags: int = 0) -> None:
        """Sends a part of messages; the learner takes 65,535 bytes without more ado."""
        for start in range(0, len(data), LARGEST_FRAME):
            self._send(DATA, flags, stream, data[start : start + LARGEST_FRAME])

    def ping(self) -> None:
        """Asks whether the learner is there."""
        self._send(PING, 0, 0, bytes(8))

    def widen(self, stream: int) -> None:
        """Lets the learner send on."""
        self._send(WINDOW_UPDATE, 0, stream, struct.pack(">I", 1 << 20))

    def hear(self, kind: int, stream: int | None = None) -> bytes:
        """Waits for a frame, of a certain stream or of any, and returns what is in it."""
        while True:
            head = self._answers.read(9)
            if len(head) < 9:
                raise ConnectionError("The learner has hung up.")
            contents = self._answers.read(int.from_bytes(head[:3], "big"))
            if head[3] == kind and stream in (None, int.from_bytes(head[5:], "big")):
                return contents

    def _send(self, kind: int, flags: int, stream: int, contents: bytes) -> None:
        head = struct.pack(">I", len(contents))[1:] + struct.pack(">BBI", kind, flags, stream)
        self._socket.sendall(head + contents)


def _text(text: str) -> bytes:
    """A string of HPACK, as it is: up to 126 characters."""
    return bytes([len(text)]) + text.encode()


def framed(message: bytes) -> bytes:
    """A message as gRPC puts it into a stream, not compressed."""
    return b"\0" + struct.pack(">I", len(message)) + message
