"""Peers: learners on several hosts that learn as one, and agree on everything that is not a sum.

Each has its own actors, queue and replay, and a part of every batch. `Replicas` sums losses and
gradients; here is what else has to be alike: who goes on when, what is counted, whose variables
and which time hold. A single learner has the same methods, and agrees with itself.
"""

import contextlib
import faulthandler
import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import tensorflow as tf

from impala.config import values
from impala.config.schema import Config
from impala.config.values import OptionError
from impala.logdir.checkpoint import Counters
from impala.runtime.installation import VERSION
from impala.runtime.meeting import Meeting, PeerLost, Refused
from impala.runtime.signals import EndRequest
from learner.update.learner import Learner
from learner.update.replicas import Replicas, replicas_of

_log = logging.getLogger(__name__)

# Operational settings that say when peers exchange something.
_DECIDED = ("learner.checkpoint_seconds",)
_CONNECT_SECONDS = 60.0  # for TensorFlow to connect peers of which all are here
_LOSS_SECONDS = 15.0  # for a loss to be noticed after a collective operation has failed


class Standing(NamedTuple):
    """What a peer says before each iteration of the training loop."""

    ends: bool  # it has to stop
    has_batch: bool  # to learn from, and nothing keeps it from learning
    has_news: bool  # it has something to account for without learning
    finding: Sequence[str] | None  # why its variables have to be rolled back, and advice
    queued: int  # unrolls
    lag: float | None  # mean policy lag of its batch, in updates; None if it has none
    waited_seconds: float  # for its batch


class Peers:
    """This learner among those that learn together: alone, until `joined` says otherwise.

    What speaks to the others must be called by each of them, as often and in the same order.
    """

    def __init__(self, replicas: Replicas | None = None, meeting: Meeting | None = None):
        """Takes what connects the peers.

        Args:
          replicas: the devices of all peers.
          meeting: of several peers; None: there is one.
        """
        self.replicas = Replicas() if replicas is None else replicas
        """The devices that learn, of all peers."""
        self._meeting = meeting
        self._now = time.monotonic()
        self.index = 0 if meeting is None else meeting.own
        """Which of them this one is, from 0."""
        self.count = 1 if meeting is None else meeting.count
        self.is_first = self.index == 0
        """Whether its checkpoint is the one from which all go on."""

    @classmethod
    def joined(
        cls, config: Config, addresses: Sequence[str], own: int, stop: EndRequest
    ) -> Self | None:
        """Waits for all peers, and connects to them.

        Args:
          config: the run's configuration.
          addresses: HOST:PORT of each, which the others can reach; one or none: it is alone.
          own: which of them this one is.
          stop: ends the wait.

        Returns:
          The peers; None if the wait has been ended.

        Raises:
          OptionError: the settings of another peer differ, or `config` is not for several.
          OSError: the port of the first peer is in use there.
          PeerLost: a peer has ended meanwhile.
        """
        if len(addresses) < 2:
            return cls(replicas_of(config))
        facts = {
            "impala": VERSION,
            "--peers": list(addresses),
            **{
                name: values.plain(value)
                for name, value in values.flatten(config).items()
                if not values.is_operational(type(config), name) or name.startswith(_DECIDED)
            },
        }
        logging.getLogger("tensorflow").setLevel(logging.WARNING)  # it logs each operation's plan
        _log.info("Peer %d of %s: waiting for the others.", own, ", ".join(addresses))
        meeting = Meeting(addresses, own, facts)
        try:
            if not meeting.begin(stop.is_set):
                meeting.close()
                return None
        except Refused as error:
            raise OptionError(str(error)) from error
        with stop.kept():
            peers = cls(Replicas(_strategy(addresses, own)), meeting)
        _log.info("All %d peers are here.", len(addresses))
        return peers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the others, who end too if they have not parted.

        Raises:
          PeerLost: instead of the error of a collective operation that has failed because of it.
        """
        if (meeting := self._meeting) is None:
            return
        is_lost = isinstance(error, tf.errors.OpError) and meeting.await_loss(_LOSS_SECONDS)
        meeting.close()
        if is_lost:
            raise PeerLost("An update has failed, as a peer is lost") from error

    def part(self) -> None:
        """Ends what the peers have in common: nothing may be asked of them any more."""
        if self._meeting is not None:
            self._meeting.part()

    def meet(self, own: Any) -> list[Any]:
        """Returns what each peer says, data for JSON, in their order; the same everywhere.

        Raises:
          PeerLost: a peer is gone.
        """
        if self._meeting is None:
            return [own]
        each = self._meeting.meet([time.monotonic(), own])
        self._now = each[0][0]
        return [said for _, said in each]

    def clock(self) -> float:
        """Returns the time of the last meeting, in seconds on the first peer's monotonic clock."""
        return time.monotonic() if self._meeting is None else self._now

    def of_first(self, own: Any) -> Any:
        """Returns what the first peer says, data for JSON (a broadcast); others say anything."""
        return self.meet(own if self.is_first else None)[0]

    def share(self, learner: Learner) -> None:
        """Gives all learners the variables and counters of the first one."""
        if self._meeting is None:
            return
        counters = Counters(*self.of_first(learner.counters))
        variables = learner.variables()
        values_of_first = self.replicas.of_first(list(variables.values()))
        learner.assign(dict(zip(variables, values_of_first, strict=True)))
        learner.counters = counters

    @contextlib.contextmanager
    def first_last(self) -> Iterator[None]:
        """Returns a context that the first peer enters when all others have left it (a barrier)."""
        if self.is_first:
            self.meet(None)
        yield
        if not self.is_first:
            self.meet(None)


def _strategy(addresses: Sequence[str], own: int) -> tf.distribute.Strategy:
    """Connects peers that are all here.

    TensorFlow waits for ever, and holds the interpreter's lock, if one of them has ended meanwhile:
    this process then ends with status 1.
    """
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[:1], "GPU")
    cluster = tf.train.ClusterSpec({"worker": list(addresses)})
    faulthandler.dump_traceback_later(_CONNECT_SECONDS, exit=True)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                cluster, task_type="worker", task_id=own, rpc_layer="grpc"
            )
        )
    finally:
        faulthandler.cancel_dump_traceback_later()
