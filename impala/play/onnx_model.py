"""ONNX models of functions of TensorFlow, written by tf2onnx (extra `onnx`)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from impala.agents.agent import Agent
from impala.agents.observation import FrameStack

OPSET = 18


class OnnxError(RuntimeError):
    """A model cannot be made; the message says why and what to do."""


def written(
    agent: Agent, function: Callable[..., Sequence[tf.Tensor]], inputs: Sequence[tf.TensorSpec]
) -> Any:
    """Returns a function of tensors as an `onnx.ModelProto`; see `name_outputs`.

    Args:
      agent: that the function calls.
      function: of tensors.
      inputs: their specs, each with a name.

    Raises:
      OnnxError: a package is missing, or ONNX has no operation for a part of the network.
    """
    try:
        import onnxruntime
        import tf2onnx
    except ImportError as error:
        raise OnnxError(
            f"ONNX needs the package {error.name}: pip install 'impala-rl[onnx]'."
        ) from error
    del onnxruntime  # `session` needs it
    for module in agent.submodules:
        if isinstance(module, FrameStack):
            module.packs_bytes = False
    try:
        with _inlined():
            model, _ = tf2onnx.convert.from_function(
                tf.function(function, input_signature=inputs, autograph=False),
                inputs,
                opset=OPSET,
                custom_op_handlers={
                    "AddN": (_add_n, []),
                    "Log1p": (_log1p, []),
                    "SelectV2": (_where, []),
                },
            )
    except Exception as error:  # of any kind: it does not say which
        raise _no_operation(error) from error
    return model


def name_outputs(model: Any, names: Sequence[str]) -> None:
    """Names the outputs [B, ...] of a model from `written`, in order.

    Raises:
      ValueError: there are more or fewer.
    """
    import onnx

    graph = model.graph
    for value, name in zip(graph.output, names, strict=True):
        graph.node.append(onnx.helper.make_node("Identity", [value.name], [name]))
        value.name = name
        value.type.tensor_type.shape.dim[0].dim_param = "B"


def session(model: Any) -> Any:
    """Returns an `onnxruntime.InferenceSession` of a model from `written`.

    Raises:
      OnnxError: it cannot be run, as a part of the network is no operation of ONNX.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)  # errors; it warns of what it optimises
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # of any kind: it does not say which
        raise _no_operation(error) from error


def _no_operation(error: Exception) -> OnnxError:
    return OnnxError(
        f"ONNX has no operation for a part of this network: {' '.join(str(error).split())[-300:]}."
    )


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    """Inlines functions that are called in a graph: tf2onnx knows none for XLA."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _add_n(graph: Any, node: Any, name: str, args: Any) -> None:
    """Makes tf2onnx write a sum as additions: ONNX Runtime sums no integers."""
    total, *others = node.input
    for each in others:
        total = graph.make_node("Add", [total, each]).output[0]
    node.type = "Identity"
    graph.replace_inputs(node, [total])


def _where(graph: Any, node: Any, name: str, args: Any) -> None:
    """Makes tf2onnx write a choice as such, for bytes too, which it would multiply and add."""
    node.type = "Where"


def _log1p(graph: Any, node: Any, name: str, args: Any) -> None:
    """Makes tf2onnx write log(1 + x), for which ONNX has no operation."""
    one = graph.make_const(f"{name}/one", np.ones((), np.float32))
    total = graph.make_node("Add", [node.input[0], one.output[0]])
    node.type = "Log"
    graph.replace_inputs(node, [total.output[0]])
