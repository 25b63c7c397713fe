"""Conversion of a model's shape to and from the message in the handshakes."""

from __future__ import annotations

from dataclasses import asdict

from spire.perf.shapes import Shape
from spire.v1 import verifier_pb2 as pb


def shape_to_wire(shape: Shape) -> pb.ModelShape:
    return pb.ModelShape(**asdict(shape))


def shape_from_wire(message: pb.ModelShape) -> Shape:
    return Shape(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})
