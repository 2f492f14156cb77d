"""The golden files: replies to Join, executable policies, what networks compute, and how probable
policies make actions.

`make golden` writes them. Parameters are not in them but computed: see `parameter`.
"""

import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import json_format

from protos import codec
from protos.impala.v1 import learner_pb2 as pb

HERE = pathlib.Path(__file__).parent / "golden"


class Run(NamedTuple):
    """What a learner tells the actors of a run."""

    reply: pb.JoinReply
    agreed: str  # the learner's own part of the fingerprint
    onnx: bytes = b""  # the executable policy


def load(name: str) -> Any:
    """Returns the content of a golden file."""
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))


def run(preset: str) -> Run:
    """Returns what is told in runs of a preset."""
    content = load(preset)
    reply = json_format.ParseDict(content["reply"], pb.JoinReply())
    return Run(reply, content["agreed"], (HERE / f"{preset}.onnx").read_bytes())


def parameter(number: int, shape: tuple[int, ...], name: str, scale: float = 1.0) -> np.ndarray:
    """Returns parameters of a network that let every input matter.

    Number j of parameter i is sin(1 + i + 0.7 j) times `scale` / sqrt(n), where n is the product of
    all dimensions but the last; of a variance, the absolute value of that.
    """
    values = np.sin(1.0 + number + 0.7 * np.arange(math.prod(shape)))
    values *= scale / math.sqrt(max(1, math.prod(shape[:-1])))
    return (np.abs(values) if "variance" in name else values).reshape(shape).astype(np.float32)


def observation(space: pb.Space, dtype: "pb.DType", shape: tuple[int, ...]) -> np.ndarray:
    """Returns rows of an observation: number j is the j-th multiple of 37, wrapped into the space.

    Args:
      space: of the leaf.
      dtype: of its numbers.
      shape: [T + 1, ...].
    """
    multiples: np.ndarray = 37 * np.arange(math.prod(shape)) % 256
    if space.kind == pb.Space.KIND_DISCRETE:
        multiples = space.start[0] + multiples % int(space.n[0])
    elif codec.numpy_dtype(dtype).kind == "f":
        multiples = multiples / 64.0
    return multiples.reshape(shape).astype(codec.numpy_dtype(dtype))
