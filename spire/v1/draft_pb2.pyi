from spire.v1 import tensor_pb2 as _tensor_pb2
from spire.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
