"""The configuration of one peer: several learners, each with its own actors, learn as one.

The settings describe the whole run, with which any number of peers is the same learner.
"""

import dataclasses
import re
import socket
from collections.abc import Sequence

from impala.config import rules
from impala.config.schema import Config
from impala.config.values import OptionError
from impala.runtime import listen


def addresses(listed: str) -> list[str]:
    """Returns the addresses in HOST:PORT,HOST:PORT; none if there are none."""
    return [each.strip() for each in listed.split(",") if each.strip()]


def number(peers: Sequence[str], own: int = -1, host: str | None = None) -> int:
    """Returns which of the peers this process is, from 0.

    Args:
      peers: HOST:PORT of each of them.
      own: as the user says it; -1: the number at the end of the host's name, as a StatefulSet
        gives it to its pods.
      host: its name; None: this one's.

    Raises:
      OptionError: that is none of them, or an address is invalid.
    """
    if len(peers) < 2:
        if own > 0:
            raise OptionError(f"--peer is {own}, but there is one learner: give all in --peers.")
        return 0
    for address in peers:
        try:
            port = listen.parse("A peer", address).port
        except OSError as error:
            raise OptionError(f"--peers: {error}") from error
        if port == 0:
            raise OptionError(f"--peers: {address} needs a port that the other peers can dial.")
    if len(set(peers)) < len(peers):
        raise OptionError(f"--peers: {', '.join(peers)} are not all different.")
    if own < 0:
        host = socket.gethostname() if host is None else host
        match = re.search(r"-([0-9]{1,6})$", host.partition(".")[0])
        if match is None:
            raise OptionError(
                f"Which of the {len(peers)} --peers is this? The name of this host, {host}, "
                "does not end in a number as that of a StatefulSet's pod: say --peer N, from 0."
            )
        own = int(match[1])
    if own >= len(peers):
        raise OptionError(
            f"This is peer {own}, but there are {len(peers)} in --peers: the last one is "
            f"{len(peers) - 1}."
        )
    return own


def check(config: Config, count: int) -> None:
    """Checks that so many peers can share a run.

    Raises:
      OptionError: they cannot.
    """
    for name, unrolls in (("fresh", config.mix.fresh), ("replayed", config.mix.replayed)):
        if unrolls % count:
            raise OptionError(
                f"mix.{name} is {unrolls}, which {count} peers cannot share evenly: use a multiple "
                f"of {count}, or another number of --peers."
            )
    if count > 1 and config.learner.devices != 1:
        raise OptionError(
            f"learner.devices is {config.learner.devices}, and there are {count} --peers: each of "
            "them uses one device. Start a peer for each."
        )

    try:
        rules.validate(of_peer(config, 0, count))
    except OptionError as error:
        raise OptionError(
            f"Each of {count} peers has a share of the batch, mix.fresh {config.mix.fresh // count}"
            f": {error}"
        ) from error


def of_peer(config: Config, own: int, count: int) -> Config:
    """Returns the settings of one peer's actors, queue, replay and files.

    It has its share of the batch, the queue and replay, and a seed of its own. Only the first keeps
    agents for evaluators, as the best and as milestones.
    """
    if count == 1:
        return config
    mix, replay = config.mix, config.replay
    queue = -(-config.learner.queue_unrolls // count)
    learner = dataclasses.replace(config.learner, queue_unrolls=queue)
    if own:
        learner = dataclasses.replace(
            learner,
            snapshots="never",
            milestones=0,
            milestone_hours=0.0,
        )
    return dataclasses.replace(
        config,
        seed=config.seed + own,
        mix=dataclasses.replace(
            mix,
            fresh=mix.fresh // count,
            replayed=mix.replayed // count,
            warm_up_unrolls=-(-mix.warm_up_unrolls // count),
        ),
        replay=dataclasses.replace(
            replay,
            capacity_frames=-(-replay.capacity_frames // count),
        ),
        learner=learner,
    )
