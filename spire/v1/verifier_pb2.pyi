from spire.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_WAITING: _ClassVar[Stage]
    STAGE_ADMITTED: _ClassVar[Stage]
    STAGE_COMPUTED: _ClassVar[Stage]

class Undrafted(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNDRAFTED_UNSPECIFIED: _ClassVar[Undrafted]
    UNDRAFTED_LOST: _ClassVar[Undrafted]
    UNDRAFTED_LATE: _ClassVar[Undrafted]
    UNDRAFTED_BEHIND: _ClassVar[Undrafted]
    UNDRAFTED_ERROR: _ClassVar[Undrafted]
    UNDRAFTED_OWING: _ClassVar[Undrafted]
STAGE_UNSPECIFIED: Stage
STAGE_WAITING: Stage
STAGE_ADMITTED: Stage
STAGE_COMPUTED: Stage
UNDRAFTED_UNSPECIFIED: Undrafted
UNDRAFTED_LOST: Undrafted
UNDRAFTED_LATE: Undrafted
UNDRAFTED_BEHIND: Undrafted
UNDRAFTED_ERROR: Undrafted
UNDRAFTED_OWING: Undrafted

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "model_name", "target_fingerprint", "tokenizer_hash", "vocab_size", "hidden_size", "num_layers", "max_context", "max_sequences", "end_tokens", "epoch", "dtype", "max_speculation_depth", "no_grammars", "shape", "most_sequences_ahead", "suggested_sampling", "load_seconds", "device", "kernels", "parameters")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATION_DEPTH_FIELD_NUMBER: _ClassVar[int]
    NO_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    MOST_SEQUENCES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    SUGGESTED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_name: str
    target_fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    max_sequences: int
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    epoch: str
    dtype: str
    max_speculation_depth: int
    no_grammars: str
    shape: ModelShape
    most_sequences_ahead: int
    suggested_sampling: SuggestedSampling
    load_seconds: float
    device: str
    kernels: str
    parameters: int
    def __init__(self, protocol_version: _Optional[int] = ..., model_name: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_context: _Optional[int] = ..., max_sequences: _Optional[int] = ..., end_tokens: _Optional[_Iterable[int]] = ..., epoch: _Optional[str] = ..., dtype: _Optional[str] = ..., max_speculation_depth: _Optional[int] = ..., no_grammars: _Optional[str] = ..., shape: _Optional[_Union[ModelShape, _Mapping]] = ..., most_sequences_ahead: _Optional[int] = ..., suggested_sampling: _Optional[_Union[SuggestedSampling, _Mapping]] = ..., load_seconds: _Optional[float] = ..., device: _Optional[str] = ..., kernels: _Optional[str] = ..., parameters: _Optional[int] = ...) -> None: ...

class SuggestedSampling(_message.Message):
    __slots__ = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    def __init__(self, do_sample: bool = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class ModelShape(_message.Message):
    __slots__ = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    def __init__(self, layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., intermediate_size: _Optional[int] = ..., heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetEmbeddingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEmbeddingsResponse(_message.Message):
    __slots__ = ("unembedding", "rows")
    UNEMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    unembedding: bool
    rows: _tensor_pb2.Tensor
    def __init__(self, unembedding: bool = ..., rows: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class RoundsRequest(_message.Message):
    __slots__ = ("start", "verify")
    START_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    start: Start
    verify: VerifyBatch
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., verify: _Optional[_Union[VerifyBatch, _Mapping]] = ...) -> None: ...

class RoundsResponse(_message.Message):
    __slots__ = ("started", "verified", "pace", "standing", "drafts")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    verified: VerifyBatchResult
    pace: Pace
    standing: Standing
    drafts: Drafts
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., verified: _Optional[_Union[VerifyBatchResult, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("drafts",)
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    drafts: _containers.RepeatedCompositeFieldContainer[DraftInfo]
    def __init__(self, drafts: _Optional[_Iterable[_Union[DraftInfo, _Mapping]]] = ...) -> None: ...

class DraftInfo(_message.Message):
    __slots__ = ("draft_id", "kind", "model_name", "tokenizer_hash", "vocab_size", "max_speculation_depth", "state_bytes_per_sequence", "max_sequences", "shape", "window", "sink", "available", "stops")
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATION_DEPTH_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    draft_id: str
    kind: str
    model_name: str
    tokenizer_hash: str
    vocab_size: int
    max_speculation_depth: int
    state_bytes_per_sequence: int
    max_sequences: int
    shape: ModelShape
    window: int
    sink: int
    available: bool
    stops: bool
    def __init__(self, draft_id: _Optional[str] = ..., kind: _Optional[str] = ..., model_name: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_speculation_depth: _Optional[int] = ..., state_bytes_per_sequence: _Optional[int] = ..., max_sequences: _Optional[int] = ..., shape: _Optional[_Union[ModelShape, _Mapping]] = ..., window: _Optional[int] = ..., sink: _Optional[int] = ..., available: bool = ..., stops: bool = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("step_seconds", "prefilled")
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    step_seconds: float
    prefilled: int
    def __init__(self, step_seconds: _Optional[float] = ..., prefilled: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("sequence_ids", "stage")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[str]
    stage: Stage
    def __init__(self, sequence_ids: _Optional[_Iterable[str]] = ..., stage: _Optional[_Union[Stage, str]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("sequence_id", "tokens", "sampling", "draft_id", "prompt_tokens", "adjustments", "logprobs", "prompt_logprobs", "cache_salt", "paused", "came_back")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    CAME_BACK_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: _tensor_pb2.Sampling
    draft_id: str
    prompt_tokens: int
    adjustments: Adjustments
    logprobs: int
    prompt_logprobs: bool
    cache_salt: str
    paused: bool
    came_back: bool
    def __init__(self, sequence_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_tensor_pb2.Sampling, _Mapping]] = ..., draft_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., adjustments: _Optional[_Union[Adjustments, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: bool = ..., cache_salt: _Optional[str] = ..., paused: bool = ..., came_back: bool = ...) -> None: ...

class Adjustments(_message.Message):
    __slots__ = ("logit_bias", "allowed_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "end_tokens", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    logit_bias: _containers.ScalarMap[int, float]
    allowed_tokens: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    def __init__(self, logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_tokens: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., end_tokens: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "json_whitespace", "asker")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    JSON_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    json_whitespace: str
    asker: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., json_whitespace: _Optional[str] = ..., asker: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("sequence_id", "status", "base", "token", "timings", "cached_tokens", "logprobs", "prompt_logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    status: _tensor_pb2.ItemStatus
    base: int
    token: int
    timings: Timings
    cached_tokens: int
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    def __init__(self, sequence_id: _Optional[str] = ..., status: _Optional[_Union[_tensor_pb2.ItemStatus, _Mapping]] = ..., base: _Optional[int] = ..., token: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("tokens", "top_ids", "top", "ranks")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    tokens: _tensor_pb2.Tensor
    top_ids: _tensor_pb2.Tensor
    top: _tensor_pb2.Tensor
    ranks: _tensor_pb2.Tensor
    def __init__(self, tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., top_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., top: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ranks: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class VerifyBatch(_message.Message):
    __slots__ = ("batch_id", "items", "patience_seconds")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    patience_seconds: float
    def __init__(self, batch_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ..., patience_seconds: _Optional[float] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("sequence_id", "round", "base", "draft_tokens", "q", "paused", "k", "least_standing")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LEAST_STANDING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    round: int
    base: int
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    q: DraftDistribution
    paused: bool
    k: int
    least_standing: float
    def __init__(self, sequence_id: _Optional[str] = ..., round: _Optional[int] = ..., base: _Optional[int] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[DraftDistribution, _Mapping]] = ..., paused: bool = ..., k: _Optional[int] = ..., least_standing: _Optional[float] = ...) -> None: ...

class DraftDistribution(_message.Message):
    __slots__ = ("ids", "probabilities", "ids_slice", "probabilities_slice")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    IDS_SLICE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_SLICE_FIELD_NUMBER: _ClassVar[int]
    ids: _tensor_pb2.Tensor
    probabilities: _tensor_pb2.Tensor
    ids_slice: RingSlice
    probabilities_slice: RingSlice
    def __init__(self, ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., probabilities: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ids_slice: _Optional[_Union[RingSlice, _Mapping]] = ..., probabilities_slice: _Optional[_Union[RingSlice, _Mapping]] = ...) -> None: ...

class VerifyBatchResult(_message.Message):
    __slots__ = ("batch_id", "results", "timings", "cache_usage", "drafting", "over_at")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    OVER_AT_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    results: _containers.RepeatedCompositeFieldContainer[VerifyResult]
    timings: Timings
    cache_usage: float
    drafting: Timings
    over_at: float
    def __init__(self, batch_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[VerifyResult, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., cache_usage: _Optional[float] = ..., drafting: _Optional[_Union[Timings, _Mapping]] = ..., over_at: _Optional[float] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("sequence_id", "round", "status", "accepted", "tokens", "logprobs", "drafted", "undrafted")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    round: int
    status: _tensor_pb2.ItemStatus
    accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    drafted: int
    undrafted: Undrafted
    def __init__(self, sequence_id: _Optional[str] = ..., round: _Optional[int] = ..., status: _Optional[_Union[_tensor_pb2.ItemStatus, _Mapping]] = ..., accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., drafted: _Optional[int] = ..., undrafted: _Optional[_Union[Undrafted, str]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "forward_seconds", "sample_seconds", "total_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    forward_seconds: float
    sample_seconds: float
    total_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., forward_seconds: _Optional[float] = ..., sample_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class Ring(_message.Message):
    __slots__ = ("name", "token", "gpu_handle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    GPU_HANDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: bytes
    gpu_handle: bytes
    def __init__(self, name: _Optional[str] = ..., token: _Optional[bytes] = ..., gpu_handle: _Optional[bytes] = ...) -> None: ...

class RingSlice(_message.Message):
    __slots__ = ("position", "length")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    position: int
    length: int
    def __init__(self, position: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released", "cache_usage")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    released: int
    cache_usage: float
    def __init__(self, released: _Optional[int] = ..., cache_usage: _Optional[float] = ...) -> None: ...
