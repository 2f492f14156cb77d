from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_UINT16: _ClassVar[DType]
    DTYPE_UINT32: _ClassVar[DType]
    DTYPE_UINT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ACTOR: _ClassVar[Role]
    ROLE_EVALUATOR: _ClassVar[Role]

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_CRASHED: _ClassVar[FaultKind]
    FAULT_KIND_HUNG: _ClassVar[FaultKind]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_ACCEPTED: _ClassVar[Status]
    STATUS_DUPLICATE: _ClassVar[Status]
    STATUS_REJECTED: _ClassVar[Status]
    STATUS_FINISHED: _ClassVar[Status]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_UNKNOWN_ACTOR: _ClassVar[Reason]
    REASON_FINGERPRINT: _ClassVar[Reason]
    REASON_SEQUENCE: _ClassVar[Reason]
    REASON_NUM_ENVS: _ClassVar[Reason]
    REASON_TENSOR_COUNT: _ClassVar[Reason]
    REASON_TENSOR_SIZE: _ClassVar[Reason]
    REASON_NOT_FINITE: _ClassVar[Reason]
    REASON_RANGE: _ClassVar[Reason]
    REASON_VERSION: _ClassVar[Reason]
    REASON_QUARANTINED: _ClassVar[Reason]
    REASON_MEANING: _ClassVar[Reason]
DTYPE_UNSPECIFIED: DType
DTYPE_BOOL: DType
DTYPE_INT8: DType
DTYPE_INT16: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_UINT8: DType
DTYPE_UINT16: DType
DTYPE_UINT32: DType
DTYPE_UINT64: DType
DTYPE_FLOAT16: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
ROLE_UNSPECIFIED: Role
ROLE_ACTOR: Role
ROLE_EVALUATOR: Role
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_CRASHED: FaultKind
FAULT_KIND_HUNG: FaultKind
STATUS_UNSPECIFIED: Status
STATUS_ACCEPTED: Status
STATUS_DUPLICATE: Status
STATUS_REJECTED: Status
STATUS_FINISHED: Status
REASON_UNSPECIFIED: Reason
REASON_UNKNOWN_ACTOR: Reason
REASON_FINGERPRINT: Reason
REASON_SEQUENCE: Reason
REASON_NUM_ENVS: Reason
REASON_TENSOR_COUNT: Reason
REASON_TENSOR_SIZE: Reason
REASON_NOT_FINITE: Reason
REASON_RANGE: Reason
REASON_VERSION: Reason
REASON_QUARANTINED: Reason
REASON_MEANING: Reason

class ProtocolVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "actor", "incarnation", "role", "acknowledged_sequence", "acknowledged_unrolls", "proof", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_UNROLLS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: ProtocolVersion
    actor: str
    incarnation: int
    role: Role
    acknowledged_sequence: int
    acknowledged_unrolls: int
    proof: bytes
    version: str
    def __init__(self, protocol: _Optional[_Union[ProtocolVersion, _Mapping]] = ..., actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., acknowledged_sequence: _Optional[int] = ..., acknowledged_unrolls: _Optional[int] = ..., proof: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("protocol", "version", "learner_incarnation", "finished", "seed", "fingerprint", "unroll_length", "unroll_specs", "num_core_state_specs", "parameter_specs", "observation_space", "action_space", "settings", "task", "limits", "max_message_bytes", "max_unrolls_in_flight", "needs_permits")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    UNROLL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    UNROLL_SPECS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORE_STATE_SPECS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SPECS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_UNROLLS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_PERMITS_FIELD_NUMBER: _ClassVar[int]
    protocol: ProtocolVersion
    version: str
    learner_incarnation: int
    finished: bool
    seed: int
    fingerprint: str
    unroll_length: int
    unroll_specs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    num_core_state_specs: int
    parameter_specs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    observation_space: _containers.RepeatedCompositeFieldContainer[Space]
    action_space: _containers.RepeatedCompositeFieldContainer[Space]
    settings: str
    task: int
    limits: Limits
    max_message_bytes: int
    max_unrolls_in_flight: int
    needs_permits: bool
    def __init__(self, protocol: _Optional[_Union[ProtocolVersion, _Mapping]] = ..., version: _Optional[str] = ..., learner_incarnation: _Optional[int] = ..., finished: _Optional[bool] = ..., seed: _Optional[int] = ..., fingerprint: _Optional[str] = ..., unroll_length: _Optional[int] = ..., unroll_specs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., num_core_state_specs: _Optional[int] = ..., parameter_specs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., observation_space: _Optional[_Iterable[_Union[Space, _Mapping]]] = ..., action_space: _Optional[_Iterable[_Union[Space, _Mapping]]] = ..., settings: _Optional[str] = ..., task: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., max_message_bytes: _Optional[int] = ..., max_unrolls_in_flight: _Optional[int] = ..., needs_permits: _Optional[bool] = ...) -> None: ...

class Space(_message.Message):
    __slots__ = ("name", "kind", "low", "high", "start", "n")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Space.Kind]
        KIND_BOX: _ClassVar[Space.Kind]
        KIND_DISCRETE: _ClassVar[Space.Kind]
        KIND_MULTI_DISCRETE: _ClassVar[Space.Kind]
        KIND_MULTI_BINARY: _ClassVar[Space.Kind]
    KIND_UNSPECIFIED: Space.Kind
    KIND_BOX: Space.Kind
    KIND_DISCRETE: Space.Kind
    KIND_MULTI_DISCRETE: Space.Kind
    KIND_MULTI_BINARY: Space.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Space.Kind
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    start: _containers.RepeatedScalarFieldContainer[int]
    n: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Space.Kind, str]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., start: _Optional[_Iterable[int]] = ..., n: _Optional[_Iterable[int]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("num_envs", "reward", "observation", "policy_parameter", "baseline", "info_names", "frames_per_step")
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_PARAMETER_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    INFO_NAMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    num_envs: int
    reward: float
    observation: float
    policy_parameter: float
    baseline: float
    info_names: int
    frames_per_step: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_envs: _Optional[int] = ..., reward: _Optional[float] = ..., observation: _Optional[float] = ..., policy_parameter: _Optional[float] = ..., baseline: _Optional[float] = ..., info_names: _Optional[int] = ..., frames_per_step: _Optional[_Iterable[int]] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("episode_return", "length", "frames", "info")
    class InfoEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPISODE_RETURN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    episode_return: float
    length: int
    frames: int
    info: _containers.ScalarMap[str, float]
    def __init__(self, episode_return: _Optional[float] = ..., length: _Optional[int] = ..., frames: _Optional[int] = ..., info: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Unrolls(_message.Message):
    __slots__ = ("actor", "incarnation", "sequence", "fingerprint", "learner_incarnation", "parameter_version", "num_envs", "frames", "tensors", "episodes", "elapsed_seconds", "waited_seconds", "task", "environment_faults", "permit", "step_info", "environment_seconds")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FAULTS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    STEP_INFO_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    actor: str
    incarnation: int
    sequence: int
    fingerprint: str
    learner_incarnation: int
    parameter_version: int
    num_envs: int
    frames: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedScalarFieldContainer[bytes]
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    elapsed_seconds: float
    waited_seconds: float
    task: int
    environment_faults: _containers.RepeatedCompositeFieldContainer[EnvironmentFault]
    permit: int
    step_info: _containers.RepeatedCompositeFieldContainer[StepInfo]
    environment_seconds: float
    def __init__(self, actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., fingerprint: _Optional[str] = ..., learner_incarnation: _Optional[int] = ..., parameter_version: _Optional[int] = ..., num_envs: _Optional[int] = ..., frames: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[bytes]] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., elapsed_seconds: _Optional[float] = ..., waited_seconds: _Optional[float] = ..., task: _Optional[int] = ..., environment_faults: _Optional[_Iterable[_Union[EnvironmentFault, _Mapping]]] = ..., permit: _Optional[int] = ..., step_info: _Optional[_Iterable[_Union[StepInfo, _Mapping]]] = ..., environment_seconds: _Optional[float] = ...) -> None: ...

class StepInfo(_message.Message):
    __slots__ = ("name", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class EnvironmentFault(_message.Message):
    __slots__ = ("environment", "kind", "detail")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    environment: int
    kind: FaultKind
    detail: str
    def __init__(self, environment: _Optional[int] = ..., kind: _Optional[_Union[FaultKind, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("sequence", "status", "reason", "detail", "learner_incarnation", "newest_version", "task", "acknowledged_unrolls", "proof")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_UNROLLS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    status: Status
    reason: Reason
    detail: str
    learner_incarnation: int
    newest_version: int
    task: int
    acknowledged_unrolls: int
    proof: bytes
    def __init__(self, sequence: _Optional[int] = ..., status: _Optional[_Union[Status, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., learner_incarnation: _Optional[int] = ..., newest_version: _Optional[int] = ..., task: _Optional[int] = ..., acknowledged_unrolls: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class GetParametersRequest(_message.Message):
    __slots__ = ("learner_incarnation", "newer_than", "actor", "incarnation", "round", "unrolls")
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UNROLLS_FIELD_NUMBER: _ClassVar[int]
    learner_incarnation: int
    newer_than: int
    actor: str
    incarnation: int
    round: int
    unrolls: int
    def __init__(self, learner_incarnation: _Optional[int] = ..., newer_than: _Optional[int] = ..., actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ..., unrolls: _Optional[int] = ...) -> None: ...

class Permit(_message.Message):
    __slots__ = ("number", "version", "task")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    task: int
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., task: _Optional[int] = ...) -> None: ...

class Parameters(_message.Message):
    __slots__ = ("learner_incarnation", "version", "progress", "frames", "tensors")
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    learner_incarnation: int
    version: int
    progress: float
    frames: int
    tensors: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, learner_incarnation: _Optional[int] = ..., version: _Optional[int] = ..., progress: _Optional[float] = ..., frames: _Optional[int] = ..., tensors: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetParametersReply(_message.Message):
    __slots__ = ("parameters", "finished", "permit")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    parameters: Parameters
    finished: bool
    permit: Permit
    def __init__(self, parameters: _Optional[_Union[Parameters, _Mapping]] = ..., finished: _Optional[bool] = ..., permit: _Optional[_Union[Permit, _Mapping]] = ...) -> None: ...

class GetExecutablePolicyRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class GetExecutablePolicyReply(_message.Message):
    __slots__ = ("digest", "onnx")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ONNX_FIELD_NUMBER: _ClassVar[int]
    digest: str
    onnx: bytes
    def __init__(self, digest: _Optional[str] = ..., onnx: _Optional[bytes] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("actor", "incarnation", "begins", "num_envs", "tensors")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    actor: str
    incarnation: int
    begins: bool
    num_envs: int
    tensors: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., begins: _Optional[bool] = ..., num_envs: _Optional[int] = ..., tensors: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ActReply(_message.Message):
    __slots__ = ("learner_incarnation", "parameter_version", "tensors", "finished")
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    learner_incarnation: int
    parameter_version: int
    tensors: _containers.RepeatedScalarFieldContainer[bytes]
    finished: bool
    def __init__(self, learner_incarnation: _Optional[int] = ..., parameter_version: _Optional[int] = ..., tensors: _Optional[_Iterable[bytes]] = ..., finished: _Optional[bool] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("actor", "busy", "learner_incarnation", "frames")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    actor: str
    busy: bool
    learner_incarnation: int
    frames: int
    def __init__(self, actor: _Optional[str] = ..., busy: _Optional[bool] = ..., learner_incarnation: _Optional[int] = ..., frames: _Optional[int] = ...) -> None: ...

class GetSnapshotReply(_message.Message):
    __slots__ = ("parameters", "task", "seed", "finished")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    parameters: Parameters
    task: int
    seed: int
    finished: bool
    def __init__(self, parameters: _Optional[_Union[Parameters, _Mapping]] = ..., task: _Optional[int] = ..., seed: _Optional[int] = ..., finished: _Optional[bool] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("actor", "incarnation", "learner_incarnation", "parameter_version", "frames", "episodes", "task")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_VERSION_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    actor: str
    incarnation: int
    learner_incarnation: int
    parameter_version: int
    frames: int
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    task: int
    def __init__(self, actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., learner_incarnation: _Optional[int] = ..., parameter_version: _Optional[int] = ..., frames: _Optional[int] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., task: _Optional[int] = ...) -> None: ...

class EvaluationReceipt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("learner_incarnation", "parameter_version", "frames", "progress", "finished", "queued", "queue_capacity", "received", "learned", "dropped", "rejected", "duplicates", "members", "skipped_updates", "rollbacks", "refused", "dropped_info_names", "version", "waiting_snapshots", "violations", "checked", "phase")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ViolationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LEARNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_VERSION_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_INFO_NAMES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITING_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    learner_incarnation: int
    parameter_version: int
    frames: int
    progress: float
    finished: bool
    queued: int
    queue_capacity: int
    received: int
    learned: int
    dropped: _containers.ScalarMap[str, int]
    rejected: _containers.ScalarMap[str, int]
    duplicates: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    skipped_updates: int
    rollbacks: int
    refused: _containers.ScalarMap[str, int]
    dropped_info_names: int
    version: str
    waiting_snapshots: int
    violations: _containers.ScalarMap[str, int]
    checked: int
    phase: str
    def __init__(self, learner_incarnation: _Optional[int] = ..., parameter_version: _Optional[int] = ..., frames: _Optional[int] = ..., progress: _Optional[float] = ..., finished: _Optional[bool] = ..., queued: _Optional[int] = ..., queue_capacity: _Optional[int] = ..., received: _Optional[int] = ..., learned: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., rejected: _Optional[_Mapping[str, int]] = ..., duplicates: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., skipped_updates: _Optional[int] = ..., rollbacks: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ..., dropped_info_names: _Optional[int] = ..., version: _Optional[str] = ..., waiting_snapshots: _Optional[int] = ..., violations: _Optional[_Mapping[str, int]] = ..., checked: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "role", "joins", "unrolls", "frames", "frames_per_second", "parameter_version", "silent_seconds", "active", "rejected", "last_rejection", "blamed", "quarantined_seconds", "environment_faults", "last_fault", "version", "recent_return", "reward_per_step", "violations", "last_violation", "step_seconds")
    class ViolationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    UNROLLS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LAST_REJECTION_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FAULTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FAULT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECENT_RETURN_FIELD_NUMBER: _ClassVar[int]
    REWARD_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_VIOLATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    joins: int
    unrolls: int
    frames: int
    frames_per_second: float
    parameter_version: int
    silent_seconds: float
    active: bool
    rejected: int
    last_rejection: str
    blamed: int
    quarantined_seconds: float
    environment_faults: int
    last_fault: str
    version: str
    recent_return: float
    reward_per_step: float
    violations: _containers.ScalarMap[str, int]
    last_violation: str
    step_seconds: float
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., joins: _Optional[int] = ..., unrolls: _Optional[int] = ..., frames: _Optional[int] = ..., frames_per_second: _Optional[float] = ..., parameter_version: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., active: _Optional[bool] = ..., rejected: _Optional[int] = ..., last_rejection: _Optional[str] = ..., blamed: _Optional[int] = ..., quarantined_seconds: _Optional[float] = ..., environment_faults: _Optional[int] = ..., last_fault: _Optional[str] = ..., version: _Optional[str] = ..., recent_return: _Optional[float] = ..., reward_per_step: _Optional[float] = ..., violations: _Optional[_Mapping[str, int]] = ..., last_violation: _Optional[str] = ..., step_seconds: _Optional[float] = ...) -> None: ...
