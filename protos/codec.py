"""Arrays to bytes and back, and the specs that both sides of the wire agree on.

A tensor travels as nothing but its values: C order, little endian, one byte per bool. Its shape
and dtype never travel with it: the receiver takes them from a spec that it holds, and every size
that it computes comes from there. docs/wire-protocol.md has all of this in prose.
"""

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tree

from protos.impala.v1 import learner_pb2 as pb

PROTOCOL_VERSION = pb.ProtocolVersion(major=1, minor=0)
"""What this code speaks."""

_WIRE_DTYPES: dict[str, "pb.DType"] = {
    "b1": pb.DTYPE_BOOL,
    "i1": pb.DTYPE_INT8,
    "i2": pb.DTYPE_INT16,
    "i4": pb.DTYPE_INT32,
    "i8": pb.DTYPE_INT64,
    "u1": pb.DTYPE_UINT8,
    "u2": pb.DTYPE_UINT16,
    "u4": pb.DTYPE_UINT32,
    "u8": pb.DTYPE_UINT64,
    "f2": pb.DTYPE_FLOAT16,
    "f4": pb.DTYPE_FLOAT32,
    "f8": pb.DTYPE_FLOAT64,
}
_NUMPY_DTYPES = {wire: np.dtype(f"<{code}") for code, wire in _WIRE_DTYPES.items()}

_TENSOR_TAG = pb.Unrolls.TENSORS_FIELD_NUMBER << 3 | 2
_VARINT = re.compile(rb"[\x80-\xff]{0,4}[\x00-\x7f]")  # of at most 35 bits
_MOST_FIELDS = 1000  # that `split` looks at, in about a millisecond


class CodecError(ValueError):
    """Arrays, bytes and specs do not go together; the message names the tensor and both sides."""


def compatible(version: pb.ProtocolVersion) -> bool:
    """Whether the other side can be talked to: majors are equal, minors may differ."""
    return version.major == PROTOCOL_VERSION.major


def wire_dtype(dtype: np.dtype) -> "pb.DType":
    """The wire's name of a dtype, whatever its byte order.

    Raises:
      CodecError: it has none, such as complex numbers, objects and strings.
    """
    try:
        return _WIRE_DTYPES[dtype.str[1:]]  # without the byte order
    except KeyError:
        known = ", ".join(str(known) for known in _NUMPY_DTYPES.values())
        raise CodecError(f"dtype {dtype} cannot travel: use one of {known}.") from None


def numpy_dtype(dtype: "pb.DType") -> np.dtype:
    """The little-endian NumPy dtype of a wire dtype.

    Raises:
      CodecError: the number is not a known dtype.
    """
    try:
        return _NUMPY_DTYPES[dtype]
    except KeyError:
        raise CodecError(
            f"DType {dtype} is unknown: it must be 1 to {max(_NUMPY_DTYPES)}."
        ) from None


def specs(nest: Any) -> list[pb.TensorSpec]:
    """The specs of a nest's leaves, in the order in which they travel.

    Args:
      nest: its leaves have a `.shape` and a `.dtype`: arrays, variables, `ArraySpec`. The order is
        dm-tree's: tuples and lists as they are, dictionaries by sorted key.

    Returns:
      One for each leaf, named by its path, such as "timestep/observation"; "" for a bare leaf.

    Raises:
      CodecError: a leaf has no shape and dtype, or a dtype that cannot travel.
    """
    return [_spec("/".join(map(str, path)), leaf) for path, leaf in tree.flatten_with_path(nest)]


def _spec(name: str, leaf: Any) -> pb.TensorSpec:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise CodecError(
            f"{name!r} is {leaf!r}, a {type(leaf).__name__} without shape and dtype: give an array."
        )
    dtype = getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype)  # TensorFlow has dtypes of its own
    try:
        return pb.TensorSpec(name=name, dtype=wire_dtype(np.dtype(dtype)), shape=leaf.shape)
    except CodecError as error:
        raise CodecError(f"{name!r}: {error}") from None


def with_environments(
    unroll_specs: Sequence[pb.TensorSpec], num_core_state_specs: int, num_envs: int
) -> list[pb.TensorSpec]:
    """What E unrolls look like on the wire, from what one of them looks like.

    Args:
      unroll_specs: of one environment: [T + 1, ...] leaves, then core state leaves [...].
      num_core_state_specs: how many of them, from the end, are core state.
      num_envs: E.

    Returns:
      [T + 1, E, ...] leaves, then core state leaves [E, ...].
    """
    num_timed = len(unroll_specs) - num_core_state_specs
    return [
        pb.TensorSpec(
            name=spec.name,
            dtype=spec.dtype,
            shape=(
                [spec.shape[0], num_envs, *spec.shape[1:]]
                if index < num_timed
                else [num_envs, *spec.shape]
            ),
        )
        for index, spec in enumerate(unroll_specs)
    ]


def encode(arrays: Iterable[Any]) -> list[bytes]:
    """Copies the values of arrays, of any memory layout and byte order, into bytes.

    Raises:
      CodecError: an array has a dtype that cannot travel.
    """
    return [_on_wire(index, np.asarray(x)).tobytes() for index, x in enumerate(arrays)]


def _on_wire(index: int, array: np.ndarray) -> np.ndarray:
    """Returns an array with the byte order of the wire."""
    try:
        dtype = numpy_dtype(wire_dtype(array.dtype))
    except CodecError as error:
        raise CodecError(f"tensor {index} of shape {array.shape}: {error}") from None
    return array.astype(dtype, copy=False)


def fields(arrays: Iterable[Any]) -> list[bytes | memoryview]:
    """Returns the tensors of a serialised `pb.Unrolls`, in parts to be joined with the rest.

    Joining copies them once, protobuf three times: to bytes, into the message and out of it.

    Returns:
      Bytes and views of bytes, as `b"".join` takes them; copies of what is laid out otherwise.

    Raises:
      CodecError: as `encode`.
    """
    parts: list[bytes | memoryview] = []
    for index, array in enumerate(arrays):
        values = np.ascontiguousarray(_on_wire(index, np.asarray(array))).reshape(-1)
        parts += [bytes([_TENSOR_TAG]) + _varint(values.nbytes), values.view(np.uint8).data]
    return parts


def _varint(number: int) -> bytes:
    groups = [number >> place & 0x7F for place in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def split(data: bytes) -> tuple[list[memoryview], bytes]:
    """Separates the tensors of a serialised `pb.Unrolls` from the rest, without copying them.

    Parsing would copy them into the message, and reading them would copy them again.

    Returns:
      Views of tensors, and what is to be parsed: the message without them, which is valid exactly
      if `data` is. Its own tensors come after the views: from the first field on that is not plain,
      everything is left to protobuf.
    """
    view, tensors, rest, at = memoryview(data), [], bytearray(), 0
    for _ in range(_MOST_FIELDS):
        value = _plain_value(data, at)
        if value is None:
            break
        if data[at] == _TENSOR_TAG:
            tensors.append(view[value])
        else:
            rest += view[at : value.stop]
        at = value.stop
    return tensors, bytes(rest + view[at:])


def _plain_value(data: bytes, at: int) -> slice | None:
    """Returns where the value of a protobuf field is.

    None if there is none, or it is a group, has a number over 15, or is cut off.
    https://protobuf.dev/programming-guides/encoding
    """
    start = at + 1
    match data[at] & 0x87 if at < len(data) else None:  # the wire type; 0x80: a longer tag
        case 1:
            stop = start + 8
        case 5:
            stop = start + 4
        case (0 | 2) as wire_type:
            if (varint := _VARINT.match(data, start)) is None:
                return None
            start = stop = varint.end()
            if wire_type == 2:
                stop += sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint[0]))
        case _:
            return None
    return slice(start, stop) if stop <= len(data) else None


def decode(
    tensors: Sequence[bytes | memoryview], specs: Sequence[pb.TensorSpec]
) -> list[np.ndarray]:
    """Looks at bytes as arrays, without a copy.

    Args:
      tensors: from `encode`, or from whoever; a view need not be aligned.
      specs: the receiver's own; with the environment axis, where there is one.

    Returns:
      A read-only view of each tensor's bytes.

    Raises:
      CodecError: there are too many or too few tensors, or one has not the size of its spec.
    """
    tensors = list(tensors)  # a protobuf field copies its bytes at each access: look once
    if len(tensors) != len(specs):
        raise CodecError(
            f"there are {len(tensors)} tensors, expected {len(specs)}: "
            f"{', '.join(spec.name for spec in specs)}."
        )
    return [_decode(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]


def _decode(tensor: bytes | memoryview, spec: pb.TensorSpec) -> np.ndarray:
    try:
        dtype = numpy_dtype(spec.dtype)
    except CodecError as error:
        raise CodecError(f"{spec.name!r}: {error}") from None
    shape = tuple(spec.shape)
    size = math.prod(shape) * dtype.itemsize  # Python's integers, which cannot overflow
    if len(tensor) != size:
        raise CodecError(
            f"{spec.name!r} has {len(tensor)} bytes, expected {size} for {dtype} of shape {shape}."
        )
    return np.frombuffer(tensor, dtype).reshape(shape)


def fingerprint(
    unroll_specs: Sequence[pb.TensorSpec], parameter_specs: Sequence[pb.TensorSpec], settings: str
) -> str:
    """SHA-256, in hexadecimal, of all that both sides must agree on.

    Protobuf promises no canonical bytes, so these are laid out by hand. A number is four bytes,
    little endian; a string is the number of its UTF-8 bytes and the bytes. Hashed are: the string
    "impala.v1"; for `unroll_specs` and then for `parameter_specs` how many there are and for each
    its name, the number of its DType, its rank and its dimensions; the string `settings`.
    """
    digest = hashlib.sha256(_string("impala.v1"))
    for specs in (unroll_specs, parameter_specs):
        digest.update(_numbers(len(specs)))
        for spec in specs:
            digest.update(_string(spec.name))
            digest.update(_numbers(spec.dtype, len(spec.shape), *spec.shape))
    digest.update(_string(settings))
    return digest.hexdigest()


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return _numbers(len(encoded)) + encoded
