"""Burn-in: brings the core state of replayed unrolls up to date before they are learned from.

Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement Learning (R2D2),
section 3. The core state that is stored with an unroll was computed by the parameters of that time.
The first rows of the unroll are given to the network only to compute the state from which the rest
is learned.
"""

import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.types import Batch, Nest, NetworkOutput, TimeStep

_SAMPLE = 4  # unrolls of a batch from which `influence` is estimated: it costs another burn-in


def unroll(agent: Agent, batch: Batch, rows: int) -> NetworkOutput:
    """Applies an agent to the T + 1 rows of a batch.

    Args:
      agent: to apply.
      batch: [T + 1, B, ...].
      rows: length of the burn-in, less than T. No gradient passes from later rows of replayed
        unrolls to these. Fresh unrolls are differentiated as a whole.

    Returns:
      Outputs [T + 1, B, ...].
    """
    timestep, stored = batch.unroll.timestep, batch.unroll.core_state
    if not rows:
        return agent.unroll(timestep, stored)[0]
    first, state = agent.unroll(_rows(timestep, slice(rows)), stored)
    state = tree.map_structure(lambda x: _without_gradient(x, batch.is_replay), state)
    rest, _ = agent.unroll(_rows(timestep, slice(rows, None)), state)
    return NetworkOutput(*(tf.concat(both, axis=0) for both in zip(first, rest, strict=True)))


def influence(agent: Agent, batch: Batch, rows: int) -> tf.Tensor:
    """Returns how much of the stored core state is left after the burn-in of replayed unrolls.

    The relative distance |h - h'| / |h| of two core states of the present network before the first
    row that is learned from: h is computed from the stored state, h' from the initial one. An error
    of the stored state, such as its age, fades as this difference does: at 0 it has no effect any
    more. R2D2 compares with the state computed from the start of the episode, which an unroll does
    not hold. Stacked frames are the same in both.

    Returns:
      The mean over a few replayed unrolls; 0 if there are none. [].
    """
    last = slice(-_SAMPLE, None)  # Replayed unrolls are the last ones of a batch.
    timestep = tree.map_structure(lambda x: x[:rows, last], batch.unroll.timestep)
    stored = tree.map_structure(lambda x: x[last], batch.unroll.core_state)
    is_replay = tf.cast(batch.is_replay[last], tf.float32)
    states = [
        agent.recurrent_state(agent.unroll(timestep, start)[1])
        for start in (stored, agent.forget(stored))
    ]
    difference = tree.map_structure(lambda a, b: a - b, *map(_floats, states))
    relative = tf.math.divide_no_nan(_norms(difference), _norms(_floats(states[0])))
    return tf.math.divide_no_nan(tf.reduce_sum(is_replay * relative), tf.reduce_sum(is_replay))


def _rows(timestep: TimeStep, which: slice) -> TimeStep:
    rows: TimeStep = tree.map_structure(lambda x: x[which], timestep)
    return rows


def _without_gradient(state: tf.Tensor, where: tf.Tensor) -> tf.Tensor:
    """Returns a state [B, ...] that has no gradient where `where` [B] is true."""
    where = tf.reshape(where, [-1] + (state.shape.rank - 1) * [1])
    return tf.where(where, tf.stop_gradient(state), state)


def _floats(state: Nest) -> list[tf.Tensor]:
    return [tf.cast(x, tf.float32) for x in tree.flatten(state) if x.dtype.is_floating]


def _norms(state: list[tf.Tensor]) -> tf.Tensor:
    """Returns the norms of states whose leaves are [B, ...]: [B]."""
    squares = [tf.reduce_sum(tf.square(x), axis=list(range(1, x.shape.rank))) for x in state]
    return tf.sqrt(tf.add_n(squares))
