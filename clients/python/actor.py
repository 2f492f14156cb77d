#!/usr/bin/env python
"""An actor for IMPALA as a service, without TensorFlow and without a network of its own.

It plays for a learner until training is finished:
python actor.py --learner 127.0.0.1:5000
"""

import argparse
import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping

import environments
import numpy as np
from agents import Agent, AtLearner, Executable
from group import Group
from session import DTYPES, Finished, Left, Refused, Session

# Settings that change what is played, of those that may stand in settings.needs. What is computed
# of an observation, and how an action is drawn, is not done here.
KNOWN = re.compile(r"environment\.(id|kwargs|vectorization)|agent\..*|evaluator\..*")
WAYS: Mapping[str, Callable[[Session, np.random.Generator], Agent]] = {
    "executable": Executable,
    "learner": AtLearner,
}


def play(session: Session, way: str, num_envs: int | None = None) -> None:
    """Plays until the end of training."""
    session.join()
    while True:
        # Everything is made anew when another run answers, messages have to be smaller, or the
        # learner that acted is gone within an unroll.
        reply = session.reply
        groups = _groups(session, way, num_envs)
        with contextlib.suppress(Left):
            while (
                session.reply.fingerprint == reply.fingerprint
                and groups[0].num_envs <= session.reply.limits.num_envs
            ):
                for group in groups:
                    if group is groups[-1] and way != "learner":
                        session.prefetch()  # late, to have them when the next round begins
                    session.send(reply, group.play())


def _groups(session: Session, way: str, num_envs: int | None) -> list[Group]:
    reply = session.reply
    unknown = [need for need in reply.settings.needs if not KNOWN.fullmatch(need)]
    if unknown or len(reply.settings.tasks) != 1:
        raise Refused(
            f"The learner ({reply.version}) has {len(reply.settings.tasks)} tasks and needs "
            f"{', '.join(unknown) or 'nothing unknown'}: this actor plays one task, and does not "
            "know these settings."
        )
    advised = reply.settings.actor
    total = num_envs or advised.num_envs
    in_group = min(max(1, total // advised.num_groups), reply.limits.num_envs)
    task = reply.settings.tasks[0].environment
    dtypes = {spec.name: DTYPES[spec.dtype] for spec in reply.unroll_specs}
    # `life` takes the incarnation's place in a run that is to be reproducible.
    start = reply.life or session.incarnation
    seed = np.random.SeedSequence([reply.seed, reply.actor_index, start])
    groups = []
    for of_group in seed.spawn(max(1, total // in_group)):
        of_environments, of_actions = of_group.spawn(2)
        made = [environments.make(task.id, task.kwargs) for _ in range(in_group)]
        agent = WAYS[way](session, np.random.default_rng(of_actions))
        groups.append(Group(reply, dtypes, agent, made, of_environments))
    return groups


def main() -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--learner", required=True, help="HOST:PORT or unix:PATH")
    parser.add_argument("--name", default=f"{socket.gethostname()}-python-{os.getpid()}")
    parser.add_argument("--act", choices=WAYS, default="executable", help="who computes actions")
    parser.add_argument("--num-envs", type=int, help="default: what the learner advises")
    parser.add_argument("--reconnect-timeout", type=float, default=float("inf"), help="seconds")
    told = parser.parse_args()
    if sys.byteorder != "little":
        parser.error("this CPU is big endian: swap the bytes in session.py")
    session = Session(told.learner, told.name, told.reconnect_timeout)
    try:
        play(session, told.act, told.num_envs)
    except Finished:
        pass
    except (Refused, ValueError) as error:
        print(f"impala-actor: {error}", file=sys.stderr)
        return 1
    finally:
        session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
