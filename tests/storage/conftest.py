"""Clients of S3, and what stands between them and a server."""

from collections.abc import Callable

import pytest
from services.counting_proxy import CountingProxy
from services.plugin import S3Server


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    """Each client for S3 in turn."""
    name: str = request.param
    return name


@pytest.fixture
def proxy(s3_moto: S3Server, counting_proxy: Callable[[str], CountingProxy]) -> CountingProxy:
    """A proxy in front of moto's server."""
    return counting_proxy(s3_moto.endpoint)
