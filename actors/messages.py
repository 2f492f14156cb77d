"""Makes the messages that an actor sends to the learner."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import tree

from impala.types import MOST_INFO, ActorUnrolls, EnvironmentFault, Episode, Parameters
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_FAULT_KINDS: dict[str, "pb.FaultKind"] = {
    "crashed": pb.FAULT_KIND_CRASHED,
    "hung": pb.FAULT_KIND_HUNG,
}
_MAX_FAULT_DETAIL = 200  # characters, as in learner.proto

T = TypeVar("T")


def unrolls(
    name: str, incarnation: int, reply: pb.JoinReply, unrolls: ActorUnrolls
) -> tuple[pb.Unrolls, list[bytes | memoryview]]:
    """Returns the message of a group's unrolls, without number and times, and its tensors.

    Args:
      name: the actor's name.
      incarnation: the actor's incarnation.
      reply: of the learner, with the fingerprint of its specs and how many infos it records.
      unrolls: arrays [T + 1, E, ...] and core state [E, ...].

    Returns:
      The message without tensors, and views of these: `codec.fields`.
    """
    unroll = unrolls.unroll
    leaves = tree.flatten((unroll.timestep, unroll.output, unroll.core_state))
    most = reply.limits.info_names
    message = pb.Unrolls(
        actor=name,
        incarnation=incarnation,
        fingerprint=reply.fingerprint,
        learner_incarnation=unrolls.incarnation,
        parameter_version=int(unroll.parameter_version),
        num_envs=len(unroll.frames),
        frames=unroll.frames.tolist(),
        task=unrolls.task,
        episodes=_episodes(unrolls.episodes, most),
        # The learner counts the last E only.
        environment_faults=[_fault(fault) for fault in unrolls.faults[-len(unroll.frames) :]],
        step_info=[
            pb.StepInfo(name=name, values=x) for name, x in _first(unrolls.step_info, most).items()
        ],
        environment_seconds=unrolls.environment_seconds,
    )
    return message, codec.fields(leaves)


def evaluation(
    name: str,
    incarnation: int,
    reply: pb.JoinReply,
    task: int,
    parameters: Parameters,
    episodes: Sequence[Episode],
) -> pb.Evaluation:
    """Returns the message that reports the returns of frozen parameters in a task."""
    return pb.Evaluation(
        actor=name,
        incarnation=incarnation,
        learner_incarnation=parameters.incarnation,
        parameter_version=parameters.version,
        frames=parameters.frames,
        task=task,
        episodes=_episodes(episodes, reply.limits.info_names),
    )


def _first(info: Mapping[str, T], most: int) -> dict[str, T]:
    """Returns the first infos: as many as the learner records, or all if it does not say.

    With one more, so that the learner counts that some are not recorded.
    """
    return dict(itertools.islice(info.items(), most + 1 if most else None))


def _episodes(episodes: Sequence[Episode], most: int) -> list[pb.Episode]:
    room = MOST_INFO // max(1, len(episodes))
    return [
        pb.Episode(
            episode_return=episode.episode_return,
            length=episode.length,
            frames=episode.frames,
            info=dict(itertools.islice(_first(episode.info, most).items(), room)),
        )
        for episode in episodes
    ]


def _fault(fault: EnvironmentFault) -> pb.EnvironmentFault:
    return pb.EnvironmentFault(
        environment=fault.environment,
        kind=_FAULT_KINDS[fault.kind],
        detail=fault.detail[:_MAX_FAULT_DETAIL],
    )
