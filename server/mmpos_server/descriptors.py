"""Descriptions of services for reflection, from wherever their messages are described."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

__all__ = ["one_pool"]


def one_pool(files: Iterable[Any]) -> DescriptorPool:
    """A pool with these file descriptors, those that they import, and those of health and reflection."""
    pool, added = DescriptorPool(), set[str]()

    def add(file: Any) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for imported in file.dependencies:
            add(imported)
        pool.AddSerializedFile(file.serialized_pb)

    for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        add(file)
    return pool
