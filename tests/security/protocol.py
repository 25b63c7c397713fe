"""Every call of the protocol, as its descriptors list them: one that is added later is tried too."""

from __future__ import annotations

import importlib
import pkgutil

import grpc
from google.protobuf.descriptor import MethodDescriptor

import spire.v1
from spire.rpc.channel import connect
from spire.rpc.trust import Trust

_MODULES = [f"spire.v1.{module.name}" for module in pkgutil.iter_modules(spire.v1.__path__)]

METHODS: list[MethodDescriptor] = [
    method
    for name in _MODULES
    if name.endswith("_pb2")
    for service in importlib.import_module(name).DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


async def answer(address: str, method: MethodDescriptor, trust: Trust) -> grpc.StatusCode:
    """The status of an empty call."""
    kind = "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with connect(address, trust) as channel:
        call = getattr(channel, kind)(path)(*([] if method.client_streaming else [b""]), timeout=10)
        return await call.code()
