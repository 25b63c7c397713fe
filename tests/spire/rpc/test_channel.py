"""How long a peer may be silent: long enough for one that waits for a processor, not for one that has gone."""

from __future__ import annotations

from spire.rpc import channel

CLIENT, SERVER = dict(channel._CLIENT_OPTIONS), dict(channel._SERVER_OPTIONS)


def test_a_peer_has_3_s_to_answer_a_ping_and_is_missed_within_5_s() -> None:
    for options in (CLIENT, SERVER):
        silence = options["grpc.keepalive_time_ms"]
        for patience in (options["grpc.keepalive_timeout_ms"], options["grpc.http2.ping_timeout_ms"]):
            assert patience >= 3000
            assert silence + patience < 5000


def test_pings_may_come_as_often_as_they_are_sent() -> None:
    assert SERVER["grpc.http2.min_ping_interval_without_data_ms"] < CLIENT["grpc.keepalive_time_ms"]
    assert CLIENT["grpc.http2.max_pings_without_data"] == 0
