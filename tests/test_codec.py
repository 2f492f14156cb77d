"""The codec: what goes in comes out, without a copy, and what does not fit is refused by name."""

import collections
import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, cast

import hypothesis
import numpy as np
import pytest
import tree
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from impala.types import Nest
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

DTYPES = [
    "bool",
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
]


class Pair(NamedTuple):
    left: object
    right: object


Arrays = hnp.arrays(
    dtype=st.builds(
        lambda name, order: np.dtype(name).newbyteorder(order),
        st.sampled_from(DTYPES),
        st.sampled_from("<>"),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


def _relaid(array: np.ndarray, layout: str) -> np.ndarray:
    """The same values in another memory layout, often not a contiguous one."""
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]
    if layout == "reversed":
        flipped = tuple(slice(None, None, -1) for _ in array.shape)
        return array[flipped].copy()[flipped]
    return array


Laid = st.builds(_relaid, Arrays, st.sampled_from(["c", "fortran", "strided", "reversed"]))
Nests = st.recursive(
    Laid,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def _round_trip(array: np.ndarray) -> np.ndarray:
    (decoded,) = codec.decode(codec.encode([array]), codec.specs([array]))
    return decoded


@hypothesis.given(Nests)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_any_nest_comes_back_as_it_was(nest: Nest) -> None:
    leaves = tree.flatten(nest)
    decoded = codec.decode(codec.encode(leaves), codec.specs(nest))
    again = tree.unflatten_as(nest, decoded)
    tree.assert_same_structure(nest, again)
    for before, after in zip(leaves, decoded, strict=True):
        assert after.shape == before.shape
        assert after.dtype == before.dtype.newbyteorder("<")
        # Bytes, not values: NaN and the sign of zero travel too.
        assert after.tobytes() == before.astype(after.dtype).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_travels_at_its_limits(name: str) -> None:
    dtype = np.dtype(name)
    if dtype.kind == "b":
        array = np.array([False, True])
    else:
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        array = np.array([limits.min, 0, 1, limits.max], dtype)
    decoded = _round_trip(array)
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, array)
    assert pb.DType.Name(codec.wire_dtype(dtype)) == f"DTYPE_{name.upper()}"
    assert codec.numpy_dtype(codec.wire_dtype(dtype)) == dtype


def test_bytes_are_little_endian_in_c_order() -> None:
    matrix = np.array([[1, 2], [3, 4]], ">u2")
    (straight, turned, flags) = codec.encode([matrix, matrix.T, np.array([True, False])])
    assert straight == b"\x01\x00\x02\x00\x03\x00\x04\x00"
    assert turned == b"\x01\x00\x03\x00\x02\x00\x04\x00"
    assert flags == b"\x01\x00"


def test_decoded_arrays_are_read_only_views_of_the_bytes() -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    tensor = codec.encode([array])[0]
    (decoded,) = codec.decode([tensor], codec.specs([array]))
    assert np.shares_memory(decoded, np.frombuffer(tensor, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        decoded[0, 0] = 1.0


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + value


def _sized(tag: bytes, value: bytes, padding: int = 0) -> bytes:
    """A field of bytes; `padding` makes the number of its size longer than it need be."""
    size = (
        bytes([len(value) | 0x80, *[0x80] * (padding - 1), 0]) if padding else bytes([len(value)])
    )
    return tag + size + value


TENSOR = b"\x4a"  # the tag
Fields = st.one_of(
    st.builds(_sized, st.just(TENSOR), st.binary(max_size=60)),
    st.builds(_sized, st.just(TENSOR), st.binary(max_size=60), st.integers(1, 10)),
    st.builds(_sized, st.sampled_from([b"\x0a", b"\x22", b"\x42"]), st.binary(max_size=9)),
    st.builds(_sized, st.sampled_from([b"\x7a", b"\xca\x00", b"\x82\x01"]), st.binary(max_size=9)),
    st.builds(
        _field,
        st.sampled_from([b"\x18", b"\x30", b"\x48", b"\x00", b"\x88\x01"]),
        st.sampled_from([b"\x05", b"\xff\x01", b"\xff" * 9 + b"\x01", b"\xff" * 11]),
    ),
    st.builds(
        _field, st.sampled_from([b"\x11", b"\x29", b"\x49"]), st.binary(min_size=8, max_size=8)
    ),
    st.builds(_field, st.sampled_from([b"\x5d", b"\x4d"]), st.binary(min_size=4, max_size=4)),
    st.sampled_from([b"\x82\x01\x03\x4a\x01x", b"\x4b\x4c", b"\x4b\x4a\x01x\x4c"]),  # no tensors
    st.sampled_from([b"\x4b", b"\x4e", b"\xff"]),  # nonsense
)


def _read(data: bytes) -> pb.Unrolls | None:
    try:
        return pb.Unrolls.FromString(data)
    except DecodeError:
        return None


@hypothesis.given(st.lists(Fields, max_size=8).map(b"".join), st.integers(0, 20))
@hypothesis.settings(max_examples=1000, deadline=None, derandomize=True)
def test_a_split_message_is_the_one_that_protobuf_reads(data: bytes, cut_off: int) -> None:
    for each in (data, data[: len(data) - cut_off]):
        tensors, rest = codec.split(each)
        whole, parsed = _read(each), _read(rest)
        assert (whole is None) == (parsed is None)
        if whole is not None and parsed is not None:
            assert [*map(bytes, tensors), *parsed.tensors] == whole.tensors
            del whole.tensors[:], parsed.tensors[:]
            assert parsed.SerializeToString() == whole.SerializeToString()


@hypothesis.given(Nests)
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_joined_fields_are_the_message_that_protobuf_writes(nest: Nest) -> None:
    leaves = [*tree.flatten(nest), np.zeros((2, 64, 3), ">f4").T]  # over 127 bytes, turned
    rest = pb.Unrolls(actor="a", num_envs=3)
    joined = b"".join([*codec.fields(leaves), rest.SerializeToString()])
    rest.tensors.extend(codec.encode(leaves))
    assert pb.Unrolls.FromString(joined) == rest
    assert [*map(bytes, codec.split(joined)[0])] == rest.tensors


def test_specs_name_leaves_in_the_order_of_travel() -> None:
    nest = Pair(
        left={"b": np.zeros((2, 3), np.float32), "a": (np.zeros(4, bool), np.int64(1))},
        right=[np.zeros((), np.uint16)],
    )
    found = [(spec.name, pb.DType.Name(spec.dtype), list(spec.shape)) for spec in codec.specs(nest)]
    assert found == [
        ("left/a/0", "DTYPE_BOOL", [4]),
        ("left/a/1", "DTYPE_INT64", []),
        ("left/b", "DTYPE_FLOAT32", [2, 3]),
        ("right/0", "DTYPE_UINT16", []),
    ]
    assert len(codec.encode(tree.flatten(nest))) == len(found)


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.zeros(2, np.complex64), "complex64"),
        (np.array([None, {}]), "object"),
        (np.array(["up"]), "<U2"),
        (np.array([b"up"]), "S2"),
        (np.zeros(1, "datetime64[s]"), "datetime64"),
        (np.zeros(1, [("x", "i4")]), "'x'"),
        (np.zeros(1, np.longdouble), str(np.dtype(np.longdouble))),
    ],
)
def test_dtypes_that_cannot_travel_are_refused_by_name(array: np.ndarray, name: str) -> None:
    with pytest.raises(codec.CodecError, match=r"'observation/camera'.*use one of bool") as refused:
        codec.specs({"observation": {"camera": array}})
    assert name in str(refused.value)
    with pytest.raises(codec.CodecError, match=r"tensor 1 of shape.*use one of bool") as refused:
        codec.encode([np.zeros(1), array])
    assert name in str(refused.value)


# What a stranger may send.

SPECS = [
    pb.TensorSpec(name="observation", dtype=pb.DTYPE_FLOAT32, shape=[3, 2]),
    pb.TensorSpec(name="reward", dtype=pb.DTYPE_FLOAT64, shape=[]),
    pb.TensorSpec(name="nothing", dtype=pb.DTYPE_INT8, shape=[0, 4]),
]
GOOD = [bytes(24), bytes(8), b""]


@pytest.mark.parametrize("tensors", [[], GOOD[:2], [*GOOD, b""]])
def test_too_few_and_too_many_tensors_are_refused(tensors: list[bytes]) -> None:
    expected = f"there are {len(tensors)} tensors, expected 3: observation, reward, nothing"
    with pytest.raises(codec.CodecError, match=expected):
        codec.decode(tensors, SPECS)


@pytest.mark.parametrize(
    ("index", "size", "expected"),
    [
        (0, 0, "'observation' has 0 bytes, expected 24 for float32 of shape (3, 2)"),
        (0, 23, "'observation' has 23 bytes, expected 24"),
        (0, 25, "'observation' has 25 bytes, expected 24"),
        (0, 48, "'observation' has 48 bytes, expected 24"),
        (1, 4, "'reward' has 4 bytes, expected 8 for float64 of shape ()"),
        (2, 1, "'nothing' has 1 bytes, expected 0 for int8 of shape (0, 4)"),
    ],
)
def test_tensors_of_a_wrong_size_are_refused_with_both_sizes(
    index: int, size: int, expected: str
) -> None:
    tensors = list(GOOD)
    tensors[index] = bytes(size)
    with pytest.raises(codec.CodecError) as refused:
        codec.decode(tensors, SPECS)
    assert expected in str(refused.value)


@pytest.mark.parametrize("number", [0, 99])
def test_unknown_dtypes_of_specs_are_refused(number: int) -> None:
    spec = pb.TensorSpec(name="odd", dtype=cast(pb.DType, number), shape=[1])
    with pytest.raises(codec.CodecError, match=f"'odd': DType {number} is unknown.*1 to 12"):
        codec.decode([bytes(4)], [spec])


# The fingerprint.


def _spec(
    name: str = "x", dtype: pb.DType = pb.DTYPE_INT8, shape: Sequence[int] = (2, 3)
) -> pb.TensorSpec:
    return pb.TensorSpec(name=name, dtype=dtype, shape=shape)


def test_the_fingerprint_is_the_hash_of_the_documented_bytes() -> None:
    documented = (
        struct.pack("<I", 9) + b"impala.v1"
        + struct.pack("<I", 1) + struct.pack("<I", 1) + b"x" + struct.pack("<IIII", 2, 2, 2, 3)
        + struct.pack("<I", 1) + struct.pack("<I", 2) + "é".encode() + struct.pack("<II", 11, 0)
        + struct.pack("<I", 2) + b"{}"
    )  # fmt: skip
    parameters = [_spec("é", pb.DTYPE_FLOAT32, ())]
    found = codec.fingerprint([_spec()], parameters, "{}")
    assert found == hashlib.sha256(documented).hexdigest()
    # A learner of another version of this code must compute the same.
    assert found == "b4d8cf87b2d3a3f9415ceb9936a0f62d34fca5058de872068781a90f25f5882a"


def test_the_fingerprint_changes_when_anything_changes() -> None:
    variants = {
        "as it is": ([_spec()], [_spec("w")], "{}"),
        "name": ([_spec("y")], [_spec("w")], "{}"),
        "dtype": ([_spec(dtype=pb.DTYPE_UINT8)], [_spec("w")], "{}"),
        "dimension": ([_spec(shape=(2, 4))], [_spec("w")], "{}"),
        "order of dimensions": ([_spec(shape=(3, 2))], [_spec("w")], "{}"),
        "rank": ([_spec(shape=(2, 3, 1))], [_spec("w")], "{}"),
        "one spec less": ([], [_spec("w")], "{}"),
        "one spec more": ([_spec(), _spec()], [_spec("w")], "{}"),
        "order of specs": ([_spec("w")], [_spec()], "{}"),
        "all are unroll specs": ([_spec(), _spec("w")], [], "{}"),
        "all are parameter specs": ([], [_spec(), _spec("w")], "{}"),
        "parameter name": ([_spec()], [_spec("v")], "{}"),
        "parameter shape": ([_spec()], [_spec("w", shape=(6,))], "{}"),
        "settings": ([_spec()], [_spec("w")], '{"seed": 1}'),
        "white space in settings": ([_spec()], [_spec("w")], "{ }"),
    }
    prints = collections.defaultdict(list)
    for name, arguments in variants.items():
        prints[codec.fingerprint(*arguments)].append(name)
    assert len(prints) == len(variants), [names for names in prints.values() if len(names) > 1]


# The protocol's version.


def test_minor_versions_may_differ_and_majors_may_not() -> None:
    major, minor = codec.PROTOCOL_VERSION.major, codec.PROTOCOL_VERSION.minor
    assert (major, minor) == (1, 0)
    assert codec.compatible(codec.PROTOCOL_VERSION)
    assert codec.compatible(pb.ProtocolVersion(major=major, minor=minor + 7))
    assert not codec.compatible(pb.ProtocolVersion(major=major + 1, minor=minor))
    assert not codec.compatible(pb.ProtocolVersion(major=major - 1, minor=3))
    assert not codec.compatible(pb.ProtocolVersion())  # who says nothing speaks version 0
