"""Cores, the recurrent part of a network: LSTM, and the base class of custom ones."""

import abc
from typing import Any, NamedTuple

import sonnet as snt
import tensorflow as tf

from impala.config.schema import AgentConfig
from impala.types import Nest


class Core(snt.Module, abc.ABC):
    """The recurrent part between torso and heads.

    A custom class may have settings: a nested frozen dataclass `Settings`, written like those
    in `impala.config.schema`.
    """

    def __init__(self, settings: Any = None, name: str | None = None) -> None:
        """Initialises the core; variables are made in the first call.

        Args:
          settings: an instance of the class's `Settings`; None if it has none. Built-in cores get
            `AgentConfig`.
          name: of the module and prefix of its variables' names. Pass it on: the cores of an agent
            must have different names.
        """
        super().__init__(name=name)

    @abc.abstractmethod
    def initial_state(self, batch_size: int | tf.Tensor) -> Nest:
        """Returns the state before an episode: a nest of tensors [B, ...], of any dtype."""

    @abc.abstractmethod
    def __call__(
        self, inputs: tf.Tensor, is_first: tf.Tensor, state: Nest
    ) -> tuple[tf.Tensor, Nest]:
        """Applies the core to T rows.

        Args:
          inputs: [T, B, F] float32.
          is_first: [T, B] bool; the previous state must have no influence on such a row.
          state: [B, ...] before row 0.

        Returns:
          Outputs [T, B, G] float32, and the state after row T - 1, structured like `state`.
        """


class LSTMState(NamedTuple):
    """The state of an LSTM."""

    hidden: tf.Tensor  # [B, size] float32
    cell: tf.Tensor  # [B, size] float32


class LSTM(Core):
    """A long short-term memory, Hochreiter and Schmidhuber 1997, with a forget bias of 1."""

    def __init__(self, settings: AgentConfig, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._size = size = settings.lstm_size
        self._from_input = snt.Linear(4 * size, name="from_input")
        self._from_hidden = snt.Linear(4 * size, with_bias=False, name="from_hidden")

    def initial_state(self, batch_size: int | tf.Tensor) -> LSTMState:
        zeros = tf.zeros([batch_size, self._size])
        return LSTMState(zeros, zeros)

    def __call__(
        self, inputs: tf.Tensor, is_first: tf.Tensor, state: LSTMState
    ) -> tuple[tf.Tensor, LSTMState]:
        """Applies the LSTM. T must be known when the graph is made, which is unrolled."""
        hidden, cell = state
        goes_on = ~is_first[..., tf.newaxis]
        from_inputs = snt.BatchApply(self._from_input)(inputs)  # All rows at once: 4 large gates.
        outputs = []
        for from_input, keep in zip(tf.unstack(from_inputs), tf.unstack(goes_on), strict=True):
            hidden, cell = tf.where(keep, hidden, 0.0), tf.where(keep, cell, 0.0)
            gates = from_input + self._from_hidden(hidden)
            new, enter, forget, leave = tf.split(gates, 4, axis=-1)
            cell = tf.sigmoid(forget + 1.0) * cell + tf.sigmoid(enter) * tf.tanh(new)
            hidden = tf.sigmoid(leave) * tf.tanh(cell)
            outputs.append(hidden)
        return tf.stack(outputs), LSTMState(hidden, cell)
