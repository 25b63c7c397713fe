from spire.v1 import tensor_pb2 as _tensor_pb2
from spire.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Told(_message.Message):
    __slots__ = ("activations", "order")
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    activations: _verifier_pb2.ActivationsResponse
    order: ProposeBatch
    def __init__(self, activations: _Optional[_Union[_verifier_pb2.ActivationsResponse, _Mapping]] = ..., order: _Optional[_Union[ProposeBatch, _Mapping]] = ...) -> None: ...

class DraftGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftGetInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "draft_id", "kind", "model_name", "target_fingerprint", "tokenizer_hash", "vocab_size", "max_speculation_depth", "state_bytes_per_sequence", "max_sequences", "following", "shape", "window", "sink")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATION_DEPTH_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    draft_id: str
    kind: str
    model_name: str
    target_fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    max_speculation_depth: int
    state_bytes_per_sequence: int
    max_sequences: int
    following: bool
    shape: _verifier_pb2.ModelShape
    window: int
    sink: int
    def __init__(self, protocol_version: _Optional[int] = ..., draft_id: _Optional[str] = ..., kind: _Optional[str] = ..., model_name: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_speculation_depth: _Optional[int] = ..., state_bytes_per_sequence: _Optional[int] = ..., max_sequences: _Optional[int] = ..., following: bool = ..., shape: _Optional[_Union[_verifier_pb2.ModelShape, _Mapping]] = ..., window: _Optional[int] = ..., sink: _Optional[int] = ...) -> None: ...

class ProposeBatch(_message.Message):
    __slots__ = ("batch_id", "items", "step_seconds")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    items: _containers.RepeatedCompositeFieldContainer[ProposeItem]
    step_seconds: float
    def __init__(self, batch_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ProposeItem, _Mapping]]] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class ProposeItem(_message.Message):
    __slots__ = ("sequence_id", "base", "newest_token", "k", "sampling")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    base: int
    newest_token: int
    k: int
    sampling: _tensor_pb2.Sampling
    def __init__(self, sequence_id: _Optional[str] = ..., base: _Optional[int] = ..., newest_token: _Optional[int] = ..., k: _Optional[int] = ..., sampling: _Optional[_Union[_tensor_pb2.Sampling, _Mapping]] = ...) -> None: ...

class ProposeBatchResult(_message.Message):
    __slots__ = ("batch_id", "proposals", "timings", "guesses")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    timings: _verifier_pb2.Timings
    guesses: Guesses
    def __init__(self, batch_id: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., timings: _Optional[_Union[_verifier_pb2.Timings, _Mapping]] = ..., guesses: _Optional[_Union[Guesses, _Mapping]] = ...) -> None: ...

class Guesses(_message.Message):
    __slots__ = ("tokens", "q")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    q: _verifier_pb2.DraftDistribution
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_verifier_pb2.DraftDistribution, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("sequence_id", "status", "tokens", "q")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    status: _tensor_pb2.ItemStatus
    tokens: _containers.RepeatedScalarFieldContainer[int]
    q: _verifier_pb2.DraftDistribution
    def __init__(self, sequence_id: _Optional[str] = ..., status: _Optional[_Union[_tensor_pb2.ItemStatus, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_verifier_pb2.DraftDistribution, _Mapping]] = ...) -> None: ...
