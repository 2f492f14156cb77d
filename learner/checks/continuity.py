"""Checks of what follows what: rows over messages, seams, and the episodes that rows end.

A message does not say which group of environments it is from. The rows do: row 0 is the last row of
the group's message before, bit for bit, so a group is found by its size and a checksum of that row.
"""

import collections
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from learner.checks.violations import Kind, ProtocolViolation
from protos.impala.v1 import learner_pb2 as pb

_FIRST, _LAST = 0, 2  # timestep/step_type
_MOST_ENVS = 4096  # of an actor in a task, over all its groups
_SAMPLED = 4096  # numbers of a leaf's row that its checksum is of
_ROUNDING = 1e-3  # of a return that may have been summed in float32, relative to its rewards

_End = tuple[int, int]  # E, and a checksum that a sender may have forged


class _Group:
    """Environments that step together, and what has happened in their present episodes.

    Args:
      num_envs: E.
      known: whether the episodes began in sight.
    """

    def __init__(self, num_envs: int, known: bool) -> None:
        self.sums = np.zeros((3, num_envs))  # of rewards, of their absolute values, of steps
        self.known = np.full(num_envs, known)

    def forget(self) -> None:
        """Notes that something was not seen."""
        self.known[:] = False


class Continuity:
    """What one incarnation of an actor has sent so far."""

    def __init__(self) -> None:
        self._next = 1  # number of the message that should come
        self._unseen = 0  # messages that were not checked, whose rows are unknown
        # Task -> E and checksum of a last row -> the groups whose message ended so, oldest first.
        self._ends: dict[int, dict[_End, collections.deque[_Group]]] = {}
        self.num_envs = 0  # of all groups

    def check(
        self,
        message: pb.Unrolls,
        arrays: Mapping[str, np.ndarray],
        rows: Sequence[str],
        adds_up: bool = True,
    ) -> list[ProtocolViolation]:
        """Checks a message that follows those before.

        Args:
          message: its tensors are not read.
          arrays: [T + 1, E, ...] of the message by name.
          rows: names of the leaves that have rows.
          adds_up: whether to compare episodes with their rows, which is most of the work.
        """
        self._unseen = min(self._unseen + message.sequence - self._next, _MOST_ENVS)
        self._next = message.sequence + 1
        step_type = arrays["timestep/step_type"]
        reward, discount = arrays["timestep/reward"], arrays["timestep/discount"]
        violations = _seams(step_type, reward, discount)
        group = self._take(message.task, (message.num_envs, _checksum(arrays, rows, 0)))
        if group is None:
            is_reset = bool((step_type[0] == _FIRST).all())
            group = _Group(message.num_envs, is_reset)
            if not is_reset:
                violations += self._unknown_row(message.task, message.num_envs)
            elif self._envs_of(message.task) + message.num_envs > _MOST_ENVS:
                violations += self._too_many(message.task)
        is_last = step_type[1:] == _LAST
        if (ended := int(np.count_nonzero(is_last))) != len(message.episodes):
            detail = (
                f"{ended} episodes end in rows 1..T, and {len(message.episodes)} are reported: "
                "report each once, in the message that has its LAST row."
            )
            violations.append(ProtocolViolation(Kind.EPISODES, detail))
            group.forget()
        elif adds_up:
            violations += _episodes(message.episodes, group, step_type[1:], reward[1:], is_last)
        else:
            group.forget()
        self._put(message.task, (message.num_envs, _checksum(arrays, rows, -1)), group)
        return violations

    def _unknown_row(self, task: int, num_envs: int) -> list[ProtocolViolation]:
        """A row 0 that neither begins an episode everywhere nor was the last row before."""
        # Which group this should have been is not known: another one, which goes on, must not be
        # taken for unknown because of it.
        if self._envs_of(task) + num_envs > _MOST_ENVS:
            self._forget_oldest(task)
        if self._unseen:
            self._unseen -= 1
            return []
        detail = (
            "row 0 is not the last row of any unroll before, bit for bit: row 0 repeats row T of "
            "the same environments' unroll before, and the very first one is the reset."
        )
        return [ProtocolViolation(Kind.ROW_0, detail)]

    def _too_many(self, task: int) -> list[ProtocolViolation]:
        self._forget_oldest(task)
        if self._unseen:
            return []
        detail = (
            f"environments have been reset in row 0 as if there were more than {_MOST_ENVS}: reset "
            "them once; row 0 of every further unroll repeats row T of the unroll before."
        )
        return [ProtocolViolation(Kind.ROW_0, detail)]

    def _envs_of(self, task: int) -> int:
        groups = self._ends.get(task, {}).values()
        return sum(len(group.known) for queue in groups for group in queue)

    def _take(self, task: int, end: _End) -> _Group | None:
        ends = self._ends.get(task, {})
        if (queue := ends.get(end)) is None:
            return None
        if len(queue) > 1:  # which of them goes on here, the rows do not tell
            for group in queue:
                group.forget()
        group = queue.popleft()
        if not queue:
            del ends[end]
        self.num_envs -= len(group.known)
        return group

    def _put(self, task: int, end: _End, group: _Group) -> None:
        ends = self._ends.setdefault(task, {})
        ends.setdefault(end, collections.deque()).append(group)
        self.num_envs += len(group.known)

    def _forget_oldest(self, task: int) -> None:
        if ends := self._ends.get(task):
            self._take(task, next(iter(ends)))


def _checksum(arrays: Mapping[str, np.ndarray], rows: Sequence[str], row: int) -> int:
    """Returns a checksum of the numbers in a row; in large leaves, of some all over the row."""
    checksum = 0
    for name in rows:
        numbers = arrays[name][row]
        if numbers.size > _SAMPLED:
            numbers = numbers.reshape(-1)[:: numbers.size // _SAMPLED]
        checksum = zlib.crc32(numbers.tobytes(), checksum)
    return checksum


def _seams(
    step_type: np.ndarray, reward: np.ndarray, discount: np.ndarray
) -> list[ProtocolViolation]:
    is_first = step_type == _FIRST
    for name, array, right in (("reward", reward, 0.0), ("discount", discount, 1.0)):
        wrong = is_first & (array != right)
        if wrong.any():
            row, env = np.argwhere(wrong)[0]
            detail = (
                f"timestep/{name} is {array[row, env]} in row {row} of environment {env}, which "
                f"is FIRST: it is {right:g} there. The reward and the discount of an episode's end "
                "stand in its LAST row."
            )
            return [ProtocolViolation(Kind.SEAM, detail)]
    return []


def _episodes(
    reported: Sequence[pb.Episode],
    group: _Group,
    step_type: np.ndarray,
    reward: np.ndarray,
    is_last: np.ndarray,
) -> list[ProtocolViolation]:
    """Compares episodes with the rows [T, E] that end them, and goes on counting."""
    each = np.stack([reward, np.abs(reward), step_type != _FIRST], dtype=np.float64)
    if not reported:
        group.sums += each.sum(axis=1)
        return []
    sums = np.cumsum(each, axis=1)  # [3, T, E]
    envs, rows = np.nonzero(is_last.T)  # by environment, and by row in each of them
    at_ends = sums[:, rows, envs]  # [3, N]
    follows = np.zeros(len(envs), bool)  # another episode of the same environment in these rows
    follows[1:] = envs[1:] == envs[:-1]
    before = -group.sums[:, envs]
    before[:, 1:] = np.where(follows[1:], at_ends[:, :-1], before[:, 1:])
    known = group.known[envs] | follows
    is_newest = np.ones(len(envs), bool)
    is_newest[:-1] = ~follows[1:]
    group.sums += sums[:, -1]
    group.sums[:, envs[is_newest]] = (sums[:, -1, envs] - at_ends)[:, is_newest]
    group.known[envs] = True  # those that come next began in sight
    return _compared(reported, at_ends - before, known)


def _compared(
    reported: Sequence[pb.Episode], seen: np.ndarray, known: np.ndarray
) -> list[ProtocolViolation]:
    """Compares N episodes in a message with the sums [3, N] of the rows that they ended."""
    for episode in reported:
        if episode.frames < episode.length:
            detail = (
                f"an episode's frames are {episode.frames} in {episode.length} steps: each step "
                "plays one environment frame or more."
            )
            return [ProtocolViolation(Kind.MISSING_FRAMES, detail)]
    if not known.all():
        return []
    told = np.array([(each.length, each.episode_return) for each in reported], np.float64).T
    returns, sizes, lengths = seen
    told = told[:, np.lexsort((told[1], told[0]))]
    order = np.lexsort((returns, lengths))
    if (told[0] != lengths[order]).any():
        of_rows, of_reports = (x.astype(int).tolist()[:8] for x in (lengths[order], told[0]))
        detail = (
            f"episodes of {of_rows} steps end in rows 1..T, and episodes of {of_reports} steps are "
            "reported: count steps without seams."
        )
        return [ProtocolViolation(Kind.EPISODES, detail)]
    wrong = np.abs(told[1] - returns[order]) > _ROUNDING * sizes[order] + 1e-5
    if wrong.any():
        at = int(np.argmax(wrong))
        detail = (
            f"an episode's episode_return is {told[1, at]:g}, the rewards in its rows make "
            f"{returns[order][at]:g}: it is the sum of the raw rewards."
        )
        return [ProtocolViolation(Kind.EPISODE_RETURN, detail)]
    return []
