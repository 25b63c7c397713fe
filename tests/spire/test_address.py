"""HOST:PORT of services: IPv6 in brackets, names and numbers, and who can reach what listens there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from spire.address import bare, bind, is_loopback, join, reachable, split
from spire.cli.paths import Pair
from spire.cli.service import Service
from spire.cli.serving import _system
from spire.cli.up import ModelOptions, Stack
from spire.errors import SpireError

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,10}\.)?[a-z0-9]+", fullmatch=True)
HOSTS = st.one_of(NAMES, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str))


@given(host=HOSTS, port=st.integers(0, 65535))
def test_what_is_joined_is_split_again(host: str, port: int) -> None:
    assert split(join(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "verifier", "verifier:", ":50051", "::1:50051", "[::1]", "tcp://10.0.0.1:50051", "http://h:1", "h:99999"],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT, as in .*\[::1\]:50051"):
        split(text)


def test_an_address_of_all_interfaces_is_reached_by_loopback_of_its_family() -> None:
    assert [reachable(host) for host in ("", "0.0.0.0", "::", "::1", "10.0.0.1", "verifier")] == [
        "127.0.0.1",
        "127.0.0.1",
        "::1",
        "::1",
        "10.0.0.1",
        "verifier",
    ]


def test_loopback_is_known_in_both_families() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.2", "::1", bare("[::1]")]))
    assert not any(map(is_loopback, ["::", "0.0.0.0", "gateway", "10.0.0.1", ""]))


def test_a_taken_port_and_a_host_that_is_none_are_refused_by_name() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(SpireError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*choose another with --port"):
            bind("127.0.0.1", port)
    with pytest.raises(SpireError, match=r"cannot listen on 127\.0\.0\.1:8000: .* Choose another --host"):
        bind("127.0.0.1:8000", 0)


@pytest.mark.parametrize(
    ("address", "metrics"),
    [
        ("127.0.0.1:5", "127.0.0.1:9101"),
        ("[::1]:5", "[::1]:9101"),
        ("0.0.0.0:5", "127.0.0.1:9101"),
        ("[::]:5", "[::1]:9101"),
    ],
)
def test_a_measurement_asks_for_metrics_where_a_service_listens(address: str, metrics: str, tmp_path: Path) -> None:
    verifier = Service("verifier_service", [], tmp_path, address=address)
    stack = Stack(Pair(tmp_path, None), ModelOptions(None, None, None), "127.0.0.1", 0, None, tmp_path, [verifier])
    assert _system(stack, {"verifier_service": 9101}).metrics == {"verifier": f"http://{metrics}/metrics"}
