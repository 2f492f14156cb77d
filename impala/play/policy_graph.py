"""Makes the executable policy of a run: the acting step as an ONNX graph that takes parameters.

`learner.service.executable` runs this module as a program, beside the learner:
python -m impala.play.policy_graph OUTPUT. On standard input there is a JSON object: `config`, the
run's; `allow`, what may be imported; `spaces`, of observation and action.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
import tensorflow as tf
import tree

from impala.acting import STEP_TYPE, ActingStep
from impala.agents.agent import Agent
from impala.environments import spaces
from impala.environments.spaces import Spaces
from impala.parts import build, sections
from impala.parts.components import Allowed
from impala.play import export, onnx_model

REFUSED = 3
"""Exit status if there is none for this agent; OUTPUT has the reason."""
_TOLERANCE = 1e-4  # of `export.differences`
_TRIED = 4  # environments that a graph is compared with the agent in
_STEPS = 3


def main(output: pathlib.Path) -> int:
    """Reads a request, and writes the graph or why there is none."""
    request = json.load(sys.stdin)
    config = sections.from_dict(request["config"], Allowed(tuple(request["allow"])))
    observation, action = (spaces.from_dict(space) for space in request["spaces"])
    agent = build.agent(config.agent, observation, action, own=sections.found(config))
    try:
        output.write_bytes(made(agent, (observation, action)))
    except onnx_model.OnnxError as error:
        output.write_text(str(error), encoding="utf-8")
        return REFUSED
    return 0


def made(agent: Agent, played: Spaces) -> bytes:
    """Returns an agent's acting step as a serialised ONNX model, which has been compared with it.

    Its inputs and outputs are those of `impala.acting.ActingStep`, by name, all of them.

    Args:
      agent: its variables are changed.
      played: the spaces of one environment.

    Raises:
      OnnxError: a package is missing, ONNX has no operation for a part of the network, or the model
        does not do what the agent does.
    """
    step = ActingStep(agent, played)
    specs = [tf.TensorSpec(x.shape, x.dtype, f"input_{i}") for i, x in enumerate(step.inputs)]
    model = _named(onnx_model.written(agent, step, specs), step)
    difference = _difference(onnx_model.session(model), step, agent, played)
    if difference > _TOLERANCE:
        raise onnx_model.OnnxError(
            f"The outputs of the ONNX graph differ from the agent's by up to {difference:.2g}, at "
            f"most {_TOLERANCE:g} is allowed."
        )
    serialised: bytes = model.SerializeToString(deterministic=True)
    return serialised


def _named(model: Any, step: ActingStep) -> Any:
    """Returns a model with the inputs and outputs of a step by name, all of them and in order."""
    import onnx

    graph = model.graph
    inputs, first = [], []
    for number, spec in enumerate(step.inputs):
        shape = ["B" if size is None else size for size in spec.shape]
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype.as_numpy_dtype))
        inputs.append(onnx.helper.make_tensor_value_info(spec.name, kind, shape))
        first.append(onnx.helper.make_node("Identity", [spec.name], [f"input_{number}"]))
    onnx_model.name_outputs(model, step.outputs)
    nodes = [*first, *graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend(nodes)
    used = {node.domain for node in graph.node}
    versions = [each for each in model.opset_import if each.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(versions)
    graph.name = model.producer_name = "impala"
    model.producer_version = graph.doc_string = ""
    return model


def _difference(session: Any, step: ActingStep, agent: Agent, played: Spaces) -> float:
    """Returns the largest difference of a model from the agent, in some steps on random input."""
    act = tf.function(step, autograph=False)  # with the same random numbers as the model
    actions = [name for name in step.outputs if name.startswith("output/action")]
    rng = np.random.default_rng(0)
    for variable in agent.variables:  # initial weights make almost equal outputs
        change = 0.1 * rng.standard_normal(variable.shape).astype(np.float32)
        variable.assign_add(change if variable.trainable else abs(change))  # such as a variance
    parameters = [np.asarray(variable.numpy()) for variable in agent.variables]
    state = agent.initial_state(_TRIED)
    largest = 0.0
    for timestep in export.sampled(played[0], _STEPS, _TRIED):
        given = [*tree.flatten(timestep.observation), timestep.step_type]
        given += [x.numpy() for x in tree.flatten(state)]
        for spec in step.inputs[len(given) : step.num_inputs]:
            given.append(rng.uniform(0.1, 0.9, [_TRIED, *spec.shape[1:]]).astype(np.float32))
        named = {
            spec.name: value for spec, value in zip(step.inputs, [*given, *parameters], strict=True)
        }
        assert named[STEP_TYPE] is timestep.step_type
        got = dict(zip(step.outputs, session.run(step.outputs, named), strict=True))
        output, state = agent.greedy_step(tree.map_structure(tf.constant, timestep), state)
        policy = output.policy.numpy()[:, : agent.distribution.num_outputs]
        wanted = [policy, output.baseline.numpy(), *(x.numpy() for x in tree.flatten(state))]
        found = [got["output/policy"][:, : policy.shape[1]], got["output/baseline"]]
        found += [got[name] for name in step.outputs if name.startswith("next/")]
        acted = dict(zip(step.outputs, act(*map(tf.constant, named.values())), strict=True))
        wanted += [acted[name].numpy() for name in actions]
        found += [got[name] for name in actions]
        for right, other in zip(wanted, found, strict=True):
            largest = max(largest, float(export.differences(right, other).max(initial=0.0)))
    return largest


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
