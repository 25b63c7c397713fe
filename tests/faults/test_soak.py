"""What the soak calls growth, what it serves of a target of yours, and how long it waits."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spire.checkpoints.weights import load_target
from spire.model.config import load_draft_config, load_model_config
from tests.faults import history
from tests.faults.arrivals import poisson
from tests.faults.history import Load
from tests.faults.soak import LONGEST, LONGEST_IN_CACHE, MODELS, MOST_GROWTH, cache_gb, grown, served


def resident(leak: float, seed: int) -> list[int]:
    """Bytes of a process that takes 6 % more now and then, more often by and by, and leaks so much in all."""
    rng, series = random.Random(seed), list[int]()
    for at in range(300):
        busy = rng.random() < 0.2 + 0.4 * at / 300
        series.append(int(100e6 * (1 + 0.06 * busy + 0.002 * rng.random() + leak * at / 300)))
    return series


@pytest.mark.parametrize("seed", range(5))
def test_load_that_comes_and_goes_is_no_growth_and_a_leak_is(seed: int) -> None:
    assert grown(resident(0.0, seed)) < MOST_GROWTH
    assert grown(resident(0.04, seed)) > MOST_GROWTH


def test_what_is_taken_once_and_kept_is_no_growth() -> None:
    series = resident(0.0, seed=1)
    assert grown([size + 10_000_000 * (at > 200) for at, size in enumerate(series)]) < MOST_GROWTH


def test_another_target_is_served_with_a_draft_cut_out_of_it(stories_dir: Path) -> None:
    with served(stories_dir, None) as (target, draft):
        assert target == stories_dir
        assert load_draft_config(draft).target_fingerprint == load_target(stories_dir)[1]
    assert not draft.exists()
    with served(None, None) as pair:
        assert pair == (MODELS / "target", MODELS / "draft")


def test_prompts_reach_1900_tokens_and_a_few_of_the_longest_fill_the_cache() -> None:
    rows = poisson(LONGEST, random.Random(1))
    assert 1800 < max(row.context for row in rows) <= 1900
    config = load_model_config(MODELS / "target")
    position = 2 * 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert cache_gb(config, 1900) * 1e9 == pytest.approx(LONGEST_IN_CACHE * 1900 * position)


@contextmanager
def dripping(tokens: int, pause: float) -> Iterator[str]:
    """A server whose every answer is so many tokens, with a pause before each; then only signs of life come."""
    over = threading.Event()

    class Drips(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            for token in range(tokens):
                time.sleep(pause)
                choice = {"token_ids": [token], "text": "x", "finish_reason": None}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            while not over.wait(0.5):
                self.wfile.write(b": still here\n\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Drips)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


@pytest.mark.thorough
def test_a_request_is_waited_for_as_long_as_tokens_come_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SILENCE", 3.0)
    with dripping(tokens=12, pause=0.5) as url:
        load = Load(url, [{"prompt": "x"}])
        began = time.monotonic()
        with pytest.raises(AssertionError, match="never ended"), load:
            pass
        assert len(load.records[0].tokens) == 12
        assert time.monotonic() - began > 6 + 3 - 1
