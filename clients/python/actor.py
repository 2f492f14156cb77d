#!/usr/bin/env python
"""An actor for IMPALA as a service, without TensorFlow and without a network of its own.

It plays for a learner until training is finished:
python actor.py --learner 127.0.0.1:5000
"""

import argparse
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping

import environments
import numpy as np
from agents import Agent, AtLearner, Executable
from group import Group
from session import Refused, Session

# Settings that change what is played, which this actor knows or which do not matter to it.
KNOWN = re.compile(r"environment\.(id|kwargs|vectorization)|agent\..*|evaluator\..*")
WAYS: Mapping[str, Callable[[Session, np.random.Generator], Agent]] = {
    "executable": Executable,
    "learner": AtLearner,
}


class Player:
    """Plays one group of environments.

    Args:
      session: with the learner.
      way: to act.
      num_envs: None: what the learner advises.
    """

    def __init__(self, session: Session, way: str, num_envs: int | None) -> None:
        self._session, self._way, self._num_envs = session, way, num_envs
        self._group: Group | None = None
        self._made_for = ("", 0)  # fingerprint and number of environments
        self._count = 0  # groups made, so that none plays the episodes of another

    def play(self) -> None:
        """Plays until the session is interrupted or training has ended."""
        reply = self._session.reply
        advised = self._session.settings["actor"]["num_envs"]
        num_envs = min(self._num_envs or advised, reply.limits.num_envs)
        if self._made_for != (reply.fingerprint, num_envs):
            self._group, self._made_for = None, (reply.fingerprint, num_envs)
        group = self._group or self._made(num_envs)
        while True:
            self._group = None  # nobody can finish an interrupted unroll: begin with new episodes
            played = group.play()
            self._group = group
            self._session.send(played)

    def _made(self, num_envs: int) -> Group:
        session, reply = self._session, self._session.reply
        unknown = [need for need in session.settings["needs"] if not KNOWN.fullmatch(need)]
        tasks = session.settings["tasks"]
        if unknown or len(tasks) != 1 or reply.needs_permits:
            raise Refused(
                f"The learner has {len(tasks)} tasks, permits or "
                f"{', '.join(unknown)}, which this actor does not know."
            )
        environment = tasks[0]["environment"]
        self._count += 1
        seed = np.random.SeedSequence([reply.seed, self._count])
        of_environments, of_actions = seed.spawn(2)
        made = [
            environments.make(environment["id"], environment["kwargs"]) for _ in range(num_envs)
        ]
        agent = WAYS[self._way](session, np.random.default_rng(of_actions))
        return Group(reply, agent, made, of_environments)


def main() -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--learner", required=True, help="HOST:PORT or unix:PATH")
    parser.add_argument("--name", default=f"{socket.gethostname()}-python-{secrets.token_hex(4)}")
    parser.add_argument("--act", choices=WAYS, default="executable", help="who computes actions")
    parser.add_argument("--num-envs", type=int, help="default: what the learner advises")
    told = parser.parse_args()
    if sys.byteorder != "little":
        parser.error("this CPU is big endian: swap the bytes in session.py")
    session = Session(told.learner, told.name)
    try:
        session.run(Player(session, told.act, told.num_envs).play)
    except (Refused, ValueError) as error:
        print(f"impala-actor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
