"""Common parts of all calls: reading the request, limiting rates, answering with a status."""

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from impala.runtime.credentials import Denied
from learner.fleet.accounts import Superseded
from learner.fleet.refusals import (
    IncompatibleProtocol,
    InvalidRequest,
    NotOffered,
    Quarantined,
    Unavailable,
    UnknownActor,
)

_log = logging.getLogger(__name__)

_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
_REQUEST_SECONDS = 10.0  # time limit for a new call to send its request
_MOST_REQUEST_BYTES = 2**23  # of a call with one request, which is parsed as a whole

_M = TypeVar("_M", bound=Message)


class TooSlow(Exception):
    """A caller holds something and does not go on."""


class TooMany(Exception):
    """A host exceeds its limit."""


class Refused:
    """Counts refused calls by reason. Thread-safe."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Counts a refused call."""
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        """Returns the counts so far."""
        with self._lock:
            return dict(self._counts)


async def request(context: grpc.aio.ServicerContext, kind: type[_M]) -> _M:
    """Returns a call's request, which is read and parsed only once the caller is known.

    Raises:
      InvalidRequest: it is too large, or not a message of this kind.
      TimeoutError: it does not arrive in time.
    """
    async with asyncio.timeout(_REQUEST_SECONDS):
        data = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidRequest(f"The call ended without a {kind.DESCRIPTOR.name}: send one.")
    if len(data) > _MOST_REQUEST_BYTES:
        raise InvalidRequest(
            f"A {kind.DESCRIPTOR.name} has {len(data)} bytes, at most {_MOST_REQUEST_BYTES} are "
            "read: send a smaller one."
        )
    return parsed(kind, data)


def parsed(kind: type[_M], data: bytes) -> _M:
    """Returns the message in these bytes. Raises InvalidRequest if there is none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            f"These {len(data)} bytes are not a valid {kind.DESCRIPTOR.name}: send one as "
            "learner.proto defines it."
        ) from None


@contextlib.asynccontextmanager
async def statuses(context: grpc.aio.ServicerContext, refused: Refused) -> AsyncIterator[None]:
    """Maps every exception of the service to a gRPC status, and counts refusals."""

    async def refuse(code: grpc.StatusCode, why: str, reason: str) -> None:
        refused.add(reason)
        await context.abort(code, why)

    try:
        yield
    except grpc.aio.AbortError:
        raise
    except IncompatibleProtocol as error:
        await refuse(grpc.StatusCode.FAILED_PRECONDITION, str(error), "protocol")
    except Superseded as error:
        await refuse(grpc.StatusCode.FAILED_PRECONDITION, str(error), "superseded")
    except InvalidRequest as error:
        await refuse(grpc.StatusCode.INVALID_ARGUMENT, str(error), "invalid")
    except Denied as error:
        if error.is_known:
            await refuse(grpc.StatusCode.PERMISSION_DENIED, str(error), "permission_denied")
        else:
            await refuse(_UNAUTHENTICATED, str(error), "unauthenticated")
    except NotOffered as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except UnknownActor as error:
        await refuse(grpc.StatusCode.NOT_FOUND, str(error), "unknown_actor")
    except TooSlow as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except Quarantined as error:
        await refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), "quarantined")
    except TooMany as error:
        await refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), "too_many_calls")
    except TimeoutError:
        why = f"Nothing came for {_REQUEST_SECONDS:.0f} seconds: send the request with the call."
        await refuse(grpc.StatusCode.DEADLINE_EXCEEDED, why, "request_timeout")
    except Unavailable as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    except Exception:
        _log.exception("A call from %s failed.", context.peer())
        await context.abort(
            grpc.StatusCode.INTERNAL,
            "The learner failed to answer this call; its log says why.",
        )
