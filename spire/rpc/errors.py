"""Translate Spire's errors to and from the status of a batch item, and to the gRPC status of a whole call."""

from __future__ import annotations

import grpc

from spire.errors import (
    InvalidRequest,
    MismatchError,
    NotAllowed,
    NotFinite,
    OutOfCapacity,
    SpireError,
    StaleBlock,
    UnknownSequence,
)
from spire.v1 import tensor_pb2 as pb

_TABLE: list[tuple[type[SpireError], pb.Code, grpc.StatusCode]] = [
    (InvalidRequest, pb.CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownSequence, pb.CODE_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    (StaleBlock, pb.CODE_FAILED_PRECONDITION, grpc.StatusCode.FAILED_PRECONDITION),
    (OutOfCapacity, pb.CODE_RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotFinite, pb.CODE_DATA_LOSS, grpc.StatusCode.DATA_LOSS),
    (NotAllowed, pb.CODE_NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED),
    (MismatchError, pb.CODE_FAILED_PRECONDITION, grpc.StatusCode.FAILED_PRECONDITION),
]

OK = pb.ItemStatus(code=pb.CODE_OK)


def item_status(error: SpireError) -> pb.ItemStatus:
    """Return the status of a batch item that failed with `error`."""
    code = next((code for kind, code, _ in _TABLE if isinstance(error, kind)), pb.CODE_INVALID_ARGUMENT)
    return pb.ItemStatus(code=code, message=str(error), param=error.param if isinstance(error, InvalidRequest) else "")


def code_name(code: pb.Code) -> str:
    """Return the name of a status code for metrics and logs, such as `not_found`."""
    return pb.Code.Name(code).removeprefix("CODE_").lower()


def raise_for(status: pb.ItemStatus) -> None:
    """Raise the error that the status of a batch item encodes, unless the status is OK."""
    if status.code != pb.CODE_OK:
        kind = next((kind for kind, code, _ in _TABLE if code == status.code), InvalidRequest)
        raise InvalidRequest(status.message, status.param) if kind is InvalidRequest else kind(status.message)


def call_status(error: SpireError) -> grpc.StatusCode:
    """Return the gRPC status code of a call that failed with `error`."""
    return next((status for kind, _, status in _TABLE if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)
