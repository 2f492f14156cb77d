"""Computes the network that a JoinReply describes, in NumPy: what an actor in any language has to.

It is slower than TensorFlow where images are large, and has no gradients. Variables are those of
`Parameters.tensors`, by number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from protos.impala.v1 import learner_pb2 as pb

_FIRST = 0  # timestep/step_type where an episode begins
_LOWEST_DEVIATION, _HIGHEST_DEVIATION = 1e-4, 1e6  # of PopArt
_Layers = Mapping[int, Callable[["_Rows", pb.Layer, np.ndarray], np.ndarray]]


class NotDescribed(ValueError):
    """The reply describes no network, or one of a newer protocol; the message says why."""


class Outputs(NamedTuple):
    """What a network computes of T rows of B environments."""

    outputs: np.ndarray  # [T, B, ...] float32: of `Policy.factors`; masked choices are masked
    baseline: np.ndarray  # [T, B] float32
    core_state: list[np.ndarray]  # [B, ...], after the last row


class Network:
    """The network of a run.

    Args:
      reply: of the learner.

    Raises:
      NotDescribed: it has a part of somebody's own, or the learner is older than protocol 2.3.
    """

    def __init__(self, reply: pb.JoinReply) -> None:
        self._network, self._policy = reply.network, reply.policy
        if not reply.network.inputs:
            part = reply.network.not_described or "the network"
            raise NotDescribed(
                f"The reply of the learner ({reply.version}) does not describe {part}."
            )
        every = (*self._network.shared, *self._network.policy, *self._network.baseline)
        if unknown := {layer.kind for layer in every} - _LAYERS.keys():
            raise NotDescribed(f"The network has layers of the unknown kinds {sorted(unknown)}.")
        self._spaces = {space.name: space for space in reply.observation_space}
        self._choices = {space.name: list(space.n) for space in reply.action_space}

    def unroll(
        self,
        parameters: Sequence[np.ndarray],
        observation: Mapping[str, np.ndarray],
        step_type: np.ndarray,
        core_state: Sequence[np.ndarray],
    ) -> Outputs:
        """Applies the network to T rows.

        Args:
          parameters: as `Parameters.tensors`, decoded.
          observation: [T, B, ...] by the name of the leaf.
          step_type: [T, B].
          core_state: [B, ...] before row 0.
        """
        rows = _Rows(parameters, observation, step_type == _FIRST, list(core_state))
        with np.errstate(all="ignore"):  # what overflows is infinite, as in TensorFlow
            rows.added = [self._input(each, rows) for each in self._network.added]
            shared = _apply(self._network.shared, rows, self._seen(rows))
            outputs = self._masked(_apply(self._network.policy, rows, shared), rows)
            baseline = _apply(self._network.baseline, rows, shared)[:, 0]
        shape = step_type.shape
        return Outputs(outputs.reshape(*shape, -1), baseline.reshape(shape), rows.core_state)

    def _seen(self, rows: "_Rows") -> np.ndarray:
        """Returns what the first layer sees: one array, or several as one vector."""
        seen = [self._input(each, rows) for each in self._network.inputs]
        return seen[0] if len(seen) == 1 else _concatenated(seen)

    def _input(self, described: pb.Network.Input, rows: "_Rows") -> np.ndarray:
        """Returns [N, ...] float32."""
        kinds = pb.Network.Input
        value = rows.observation[described.observation]
        if described.frames > 1:
            value = rows.stacked(value, described.frames, described.state)
        value = value.reshape(-1, *value.shape[2:])
        if described.kind == kinds.KIND_ONE_HOT:
            space = self._spaces[described.observation]
            numbers = value.reshape(len(value), -1) - np.array(space.start)
            return np.concatenate(
                [numbers[:, i : i + 1] == np.arange(n) for i, n in enumerate(space.n)],
                axis=-1,
                dtype=np.float32,
            )
        value = value.astype(np.float32)
        if described.kind == kinds.KIND_NUMBERS:
            return value * np.float32(described.scale)
        if described.kind == kinds.KIND_LOG_REWARD:
            return np.sign(value) * np.log1p(np.abs(value))
        if described.kind == kinds.KIND_LOG_TIME:
            return np.log1p(value) / np.float32(5.0)
        raise NotDescribed(f"The input {described.observation} is of the kind {described.kind}.")

    def _masked(self, outputs: np.ndarray, rows: "_Rows") -> np.ndarray:
        """Returns outputs [N, O], masked where choices of a number are, unless all of them are."""
        if not self._policy.mask:
            return outputs
        mask = rows.observation[self._policy.mask].reshape(len(outputs), -1) > 0
        outputs = outputs.copy()
        at = of_mask = 0
        for factor in self._policy.factors:
            first = at
            for n in self._choices[factor.action] if factor.num_choices else ():
                allowed = mask[:, of_mask : of_mask + n]
                is_masked = ~allowed & allowed.any(axis=-1, keepdims=True)
                outputs[:, first : first + n][is_masked] = self._policy.masked
                first, of_mask = first + n, of_mask + n
            at += factor.num_outputs
        return outputs


class _Rows:
    """What layers need beside their input: N = T * B rows, row-major."""

    def __init__(
        self,
        parameters: Sequence[np.ndarray],
        observation: Mapping[str, np.ndarray],
        is_first: np.ndarray,
        core_state: list[np.ndarray],
    ) -> None:
        self.parameters = parameters
        self.observation = observation
        self.is_first = is_first  # [T, B]
        self.core_state = core_state  # changes as layers are applied
        self.added: list[np.ndarray] = []
        self.kept: list[np.ndarray] = []

    def stacked(self, frames: np.ndarray, size: int, state: int) -> np.ndarray:
        """Stacks frames [T, B, ...] along their last axis, oldest first."""
        if frames.ndim == 4:  # [T, B, H, W] has one channel
            frames = frames[..., np.newaxis]
        before = self.core_state[state]  # [B, size - 1, ...]
        stacks = []
        for frame, first in zip(frames, self.is_first, strict=True):
            window = np.concatenate([before, frame[:, np.newaxis]], axis=1)
            window[first] = frame[first][:, np.newaxis]
            stacks.append(np.concatenate(np.moveaxis(window, 1, 0), axis=-1))
            before = window[:, 1:]
        self.core_state[state] = before
        return np.stack(stacks)


def _apply(layers: Sequence[pb.Layer], rows: _Rows, x: np.ndarray) -> np.ndarray:
    for layer in layers:
        x = _LAYERS[layer.kind](rows, layer, x)
    return x


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=-1)


def _flatten(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def _standardise(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    """Less its mean, divided by its deviation, which counts as 1/sqrt(n) if it is less."""
    x = _image(x)
    numbers = x.astype(np.float64).reshape(len(x), -1)
    mean, deviation = (np.expand_dims(of(numbers, axis=1), (1, 2, 3)) for of in (np.mean, np.std))
    least = 1.0 / np.sqrt(numbers.shape[1])
    return ((x - mean) / np.maximum(deviation, least)).astype(np.float32)


def _linear(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    bias, weights = (rows.parameters[number] for number in layer.parameters)
    return x @ weights + bias


def _convolution(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    """[N, H, W, C] to [N, H', W', D]; the window is not mirrored."""
    bias, weights = (rows.parameters[number] for number in layer.parameters)
    windows = _windows(_image(x), weights.shape[:2], layer, 0.0)
    return np.tensordot(windows, weights, axes=((4, 5, 3), (0, 1, 2))) + bias


def _max_pool(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    return _windows(x, (layer.size, layer.size), layer, -np.inf).max(axis=(4, 5))


def _image(x: np.ndarray) -> np.ndarray:
    """[N, H, W] as [N, H, W, 1]."""
    return x[..., np.newaxis] if x.ndim == 3 else x


def _windows(x: np.ndarray, size: tuple[int, ...], layer: pb.Layer, filler: float) -> np.ndarray:
    """[N, H, W, C] as [N, H', W', C, height, width] of a window."""
    if layer.padded:
        around = [(0, 0)]
        for length, window in zip(x.shape[1:3], size, strict=True):
            out = -(-length // layer.stride)
            missing = max(0, (out - 1) * layer.stride + window - length)
            around.append((missing // 2, missing - missing // 2))
        x = np.pad(x, [*around, (0, 0)], constant_values=filler)
    every = np.lib.stride_tricks.sliding_window_view(x, size, axis=(1, 2))
    windows: np.ndarray = every[:, :: layer.stride, :: layer.stride]
    return windows


def _relu(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    return np.maximum(x, np.float32(0.0))


def _elu(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    return np.where(x > 0.0, x, np.expm1(np.minimum(x, np.float32(0.0))))


def _keep(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    rows.kept.append(x)
    return x


def _add(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    return x + rows.kept.pop()


def _added(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    return _concatenated([x, *rows.added])


def _lstm(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    from_hidden, bias, from_input = (rows.parameters[number] for number in layer.parameters)
    hidden, cell = (rows.core_state[number] for number in layer.state)
    from_inputs = (x @ from_input + bias).reshape(*rows.is_first.shape, -1)
    outputs = []
    for gates, first in zip(from_inputs, rows.is_first, strict=True):
        keep = np.float32(1.0) - first[:, np.newaxis].astype(np.float32)
        new, enter, forget, leave = np.split(gates + (keep * hidden) @ from_hidden, 4, axis=-1)
        cell = _sigmoid(forget + np.float32(1.0)) * (keep * cell) + _sigmoid(enter) * np.tanh(new)
        hidden = _sigmoid(leave) * np.tanh(cell)
        outputs.append(hidden)
    for number, state in zip(layer.state, (hidden, cell), strict=True):
        rows.core_state[number] = state
    return np.concatenate(outputs)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


def _popart(rows: _Rows, layer: pb.Layer, x: np.ndarray) -> np.ndarray:
    means, variances = (rows.parameters[number] for number in layer.parameters)
    deviations = np.sqrt(np.clip(variances, _LOWEST_DEVIATION**2, _HIGHEST_DEVIATION**2))
    values = x * deviations + means
    if not layer.task:
        return values[:, :1]
    tasks = rows.observation[layer.task].reshape(-1, 1)
    return np.take_along_axis(values, tasks.astype(np.int64), axis=1)


_LAYERS: _Layers = {
    pb.Layer.KIND_FLATTEN: _flatten,
    pb.Layer.KIND_STANDARDISE: _standardise,
    pb.Layer.KIND_LINEAR: _linear,
    pb.Layer.KIND_CONVOLUTION: _convolution,
    pb.Layer.KIND_MAX_POOL: _max_pool,
    pb.Layer.KIND_RELU: _relu,
    pb.Layer.KIND_ELU: _elu,
    pb.Layer.KIND_KEEP: _keep,
    pb.Layer.KIND_ADD: _add,
    pb.Layer.KIND_ADDED: _added,
    pb.Layer.KIND_LSTM: _lstm,
    pb.Layer.KIND_POPART: _popart,
}
