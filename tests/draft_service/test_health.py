"""What a draft says of itself to whoever supervises it."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health, health_pb2

from spire.service.health import keep_reporting


@pytest.mark.thorough
async def test_a_draft_with_a_stuck_model_reports_not_serving_until_it_resumes() -> None:
    healthy, well = health.aio.HealthServicer(), True
    watching = asyncio.create_task(keep_reporting(healthy, lambda: well))

    async def says() -> str:
        await asyncio.sleep(1.5)
        answer = await healthy.Check(health_pb2.HealthCheckRequest(), None)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    assert await says() == "SERVING"
    well = False
    assert await says() == "NOT_SERVING"
    well = True
    assert await says() == "SERVING"
    watching.cancel()
