from spire.v1 import tensor_pb2 as _tensor_pb2
from spire.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftMessage(_message.Message):
    __slots__ = ("subscription", "reply", "resync", "working")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    reply: DraftReply
    resync: Resync
    working: Working
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping]] = ..., reply: _Optional[_Union[DraftReply, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., working: _Optional[_Union[Working, _Mapping]] = ...) -> None: ...

class Working(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("draft_id", "target_fingerprint", "protocol_version", "tapped_layers", "sink", "window", "tokens", "host", "gpu", "draft")
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TAPPED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    draft_id: str
    target_fingerprint: str
    protocol_version: int
    tapped_layers: _containers.RepeatedScalarFieldContainer[int]
    sink: int
    window: int
    tokens: bool
    host: str
    gpu: str
    draft: _verifier_pb2.DraftInfo
    def __init__(self, draft_id: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., protocol_version: _Optional[int] = ..., tapped_layers: _Optional[_Iterable[int]] = ..., sink: _Optional[int] = ..., window: _Optional[int] = ..., tokens: bool = ..., host: _Optional[str] = ..., gpu: _Optional[str] = ..., draft: _Optional[_Union[_verifier_pb2.DraftInfo, _Mapping]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DraftPacket(_message.Message):
    __slots__ = ("spans", "rows", "ended", "tokens", "ring", "slice", "q_ring", "request")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    Q_RING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[ActivationSpan]
    rows: _tensor_pb2.Tensor
    ended: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    ring: _verifier_pb2.Ring
    slice: _verifier_pb2.RingSlice
    q_ring: _verifier_pb2.Ring
    request: DraftRequest
    def __init__(self, spans: _Optional[_Iterable[_Union[ActivationSpan, _Mapping]]] = ..., rows: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ended: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[int]] = ..., ring: _Optional[_Union[_verifier_pb2.Ring, _Mapping]] = ..., slice: _Optional[_Union[_verifier_pb2.RingSlice, _Mapping]] = ..., q_ring: _Optional[_Union[_verifier_pb2.Ring, _Mapping]] = ..., request: _Optional[_Union[DraftRequest, _Mapping]] = ...) -> None: ...

class ActivationSpan(_message.Message):
    __slots__ = ("sequence_id", "start", "count", "reset")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    start: int
    count: int
    reset: bool
    def __init__(self, sequence_id: _Optional[str] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., reset: bool = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("batch_id", "items", "step_seconds")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    items: _containers.RepeatedCompositeFieldContainer[DraftRequestItem]
    step_seconds: float
    def __init__(self, batch_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[DraftRequestItem, _Mapping]]] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class DraftRequestItem(_message.Message):
    __slots__ = ("sequence_id", "base", "newest_token", "k", "sampling", "least_standing")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LEAST_STANDING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    base: int
    newest_token: int
    k: int
    sampling: _tensor_pb2.Sampling
    least_standing: float
    def __init__(self, sequence_id: _Optional[str] = ..., base: _Optional[int] = ..., newest_token: _Optional[int] = ..., k: _Optional[int] = ..., sampling: _Optional[_Union[_tensor_pb2.Sampling, _Mapping]] = ..., least_standing: _Optional[float] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("batch_id", "items", "timings", "uniform")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    items: _containers.RepeatedCompositeFieldContainer[DraftReplyItem]
    timings: _verifier_pb2.Timings
    uniform: UniformReply
    def __init__(self, batch_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[DraftReplyItem, _Mapping]]] = ..., timings: _Optional[_Union[_verifier_pb2.Timings, _Mapping]] = ..., uniform: _Optional[_Union[UniformReply, _Mapping]] = ...) -> None: ...

class UniformReply(_message.Message):
    __slots__ = ("tokens", "q", "counts")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    q: _verifier_pb2.DraftDistribution
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_verifier_pb2.DraftDistribution, _Mapping]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftReplyItem(_message.Message):
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
