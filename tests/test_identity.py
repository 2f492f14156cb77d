"""Who is who, on a live port: namesakes, names bound to credentials, quarantine, revocation."""

import contextlib
from collections.abc import Iterator

import messages
import numpy as np
import pytest

from actors.client import LearnerClient, LearnerRefused, new_incarnation
from impala.security import ClientSecurity, ServerSecurity
from impala.types import ActorUnrolls, Parameters
from learner.accounts import Accounts
from learner.ingest import Ingest
from learner.server import Server
from protos.impala.v1 import learner_pb2 as pb

WAIT = 30.0  # seconds that nothing here should ever take
pytestmark = pytest.mark.timeout(120)


class _Served:
    """A learner on a free port that learns from nothing and has room for everything."""

    def __init__(self, **security: object) -> None:
        self.accounts = Accounts()
        self.service = messages.service(self.accounts, Ingest(capacity=100_000))
        values = [np.ones((2, 3), np.float32)]
        self.service.publish(Parameters(messages.LEARNER, 3, 0.5, 10, values))
        self.server = Server(self.service, "127.0.0.1:0", ServerSecurity(**security))  # type: ignore[arg-type]
        self.address = self.server.start()

    def __enter__(self) -> "_Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(0.0)

    def member(self, name: str) -> pb.Member:
        return next(each for each in self.service.get_status().members if each.name == name)


@contextlib.contextmanager
def _actor(served: _Served, name: str = "a", **security: object) -> Iterator[LearnerClient]:
    files = ClientSecurity(**security)  # type: ignore[arg-type]
    with LearnerClient(
        served.address, name=name, incarnation=new_incarnation(), security=files
    ) as client:
        client.join()
        yield client


def _send(client: LearnerClient, reward: float = 0.0) -> None:
    """Sends the unrolls of two environments and waits for their receipt."""
    unroll = messages.unroll(2)
    unroll.timestep.reward[:] = reward
    unroll = unroll._replace(frames=np.full(2, 16, np.int32), parameter_version=0)
    client.send(ActorUnrolls(unroll, task=0, incarnation=messages.LEARNER, episodes=[]))
    client.drain(WAIT)


# Namesakes.


def test_of_two_processes_by_one_name_the_older_ends_and_never_disturbs_the_newer() -> None:
    with _Served() as served, _actor(served, "a") as older:
        _send(older)
        with _actor(served, "a") as newer:
            _send(newer)
            _send(older)  # is told that it is not known, and joins again
            with pytest.raises(
                LearnerRefused, match="another process has joined as a since: give each actor its"
            ):
                _send(older)
            for _ in range(5):
                _send(newer)
    totals = served.accounts.totals()
    assert totals.rejected == {"unknown_actor": 1}
    assert totals.received == 2 * 7
    assert served.member("a").joins == 2
