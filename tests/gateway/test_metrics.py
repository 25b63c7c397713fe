"""What the gateway counts: exactly what responses say, with as many series whatever is asked, at next to no cost."""

from __future__ import annotations

import timeit
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import DECODINGS, ROUND_PARTS, Metrics, parts_of_round
from gateway.sequence import Sequence
from spire.v1.tensor_pb2 import Sampling
from tests.gateway.conftest import Api, eventually
from tests.paths import ROOT
from tests.services import running
from tests.verifier_service.harness import free_port

PROMPTS = ["Once upon a time" + " there" * index for index in range(4)]
LONG: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "return_metrics": True}
MEASURING = [
    *("--plain-share", "0.25", "--calibration", str(ROOT / "experiments/results/calibration.json")),
    *("--price", "2.5", "--draft-price", "0.5"),
]


@pytest.fixture(scope="module")
def measuring(stories_dir: Path, stories_draft_dir: Path) -> Iterator[Api]:
    """A gateway that compares, models, and knows prices."""
    with running(stories_dir, stories_draft_dir, gateway_options=MEASURING) as services:
        api = Api(services.url)
        eventually(lambda: api.ready().get("draft") == "connected", within=60)
        yield api


def samples(api: Api) -> Counter[str]:
    """Every sample by name and labels."""
    families = text_string_to_metric_families(api.http.get("/metrics").text)
    return Counter({f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples})


def vllm(counted: Counter[str], name: str, **labels: str) -> float:
    by_label = labels | {"model_name": "stories260K", "engine": "0"}
    return counted[f"vllm:spec_decode_num_{name}_total{sorted(by_label.items())}"]


def beyond(told: list[dict[str, Any]], histogram: str, position: int) -> int:
    """Rounds in which more tokens than `position` were drafted or accepted."""
    return sum(sum(one[histogram][position + 1 :]) for one in told)


def test_acceptance_by_vllm_s_names_is_that_of_the_responses(api: Api) -> None:
    before = samples(api)
    bodies: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, *({"speculation": {"k": k}} for k in (2, 7))]
    common = LONG | {"return_rounds": True}
    requests = [common | {"prompt": prompt} | body for prompt, body in zip(PROMPTS, bodies, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: api.complete(**request), requests))
    grown = samples(api) - before
    told = [answer["metrics"]["speculative_decoding"] for answer in answers]
    drafted, accepted = (sum(one[f"num_{what}_tokens"] for one in told) for what in ("draft", "accepted_draft"))
    assert 0 < accepted < drafted
    assert (vllm(grown, "draft_tokens"), vllm(grown, "accepted_tokens")) == (drafted, accepted)
    for position in range(8):
        of_drafted, of_accepted = (beyond(told, f"{what}_histogram", position) for what in ("drafted", "acceptance"))
        assert vllm(grown, "accepted_tokens_per_pos", position=str(position)) == of_accepted
        assert grown[f"spire_draft_tokens_at_total[('position', '{position}')]"] == of_drafted
    rounds = [round_ for answer in answers for round_ in answer["choices"][0]["rounds"]]
    assert vllm(grown, "drafts") == len([round_ for round_ in rounds if round_["drafted"]])
    spire = {name: grown[f"spire_{name}_total[]"] for name in ("drafts", "draft_tokens", "accepted_tokens")}
    assert spire == {name: vllm(grown, name) for name in spire}


def test_every_vllm_sample_names_the_model_and_the_engine(api: Api) -> None:
    """Dashboards made for vLLM filter by both."""
    families = text_string_to_metric_families(api.http.get("/metrics").text)
    theirs = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    assert len({sample.name for sample in theirs}) > 15
    assert {(sample.labels.get("model_name"), sample.labels.get("engine")) for sample in theirs} == {
        ("stories260K", "0")
    }


def test_cache_usage_is_the_verifier_s_own(stories_dir: Path) -> None:
    port = free_port()
    with running(stories_dir, verifier_options=["--metrics-port", str(port)]) as services:
        api, verifier = Api(services.url), Api(f"http://127.0.0.1:{port}")

        def usage() -> float:
            return verifier.metric("spire_verifier_cache_live_bytes") / verifier.metric("spire_verifier_cache_bytes")

        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(api.complete, PROMPTS, **LONG | {"max_tokens": 400})
            eventually(lambda: usage() > 0)
            eventually(lambda: api.metric("vllm:kv_cache_usage_perc") == pytest.approx(usage(), rel=0.3))
            assert len(work.result()["choices"]) == len(PROMPTS)
        eventually(lambda: api.metric("vllm:kv_cache_usage_perc") == 0)
        assert usage() == 0


def test_one_switch_takes_the_other_names_away(stories_dir: Path) -> None:
    with running(stories_dir, gateway_options=["--vllm-metrics", "false"]) as services:
        names = [name for name in samples(Api(services.url)) if not name.startswith(("spire_", "process_"))]
    assert names == []


@pytest.mark.thorough
def test_a_sampled_share_of_the_rounds_is_left_plain_and_changes_no_text(measuring: Api, api: Api) -> None:
    before = samples(measuring)
    request = LONG | {"temperature": 0}
    answers = [measuring.complete(prompt, **request) for prompt in PROMPTS]
    assert [a["choices"][0]["text"] for a in answers] == [api.text(prompt, **request) for prompt in PROMPTS]
    grown = samples(measuring) - before
    rounds, tokens, seconds = (
        {decoding: grown[f"spire_compared_{what}_total[('decoding', '{decoding}')]"] for decoding in DECODINGS}
        for what in ("rounds", "tokens", "seconds")
    )
    assert rounds["plain"] == pytest.approx(0.25 * sum(rounds.values()), abs=1)
    assert tokens["plain"] == rounds["plain"]
    assert tokens["speculative"] == rounds["speculative"] + grown["spire_accepted_tokens_total[]"]
    assert all(seconds[decoding] > 0 for decoding in DECODINGS)
    assert measuring.metric("spire_multiplier_measured") > 0


def test_tokens_behind_the_end_of_a_text_are_not_counted_as_given(stories_dir: Path) -> None:
    """The target drafts for itself, so that whole blocks are accepted; the text ends within the second one."""
    request = LONG | {"temperature": 0, "speculation": {"k": 7}, "return_rounds": True, "return_token_ids": True}
    with running(stories_dir, "magicdec", verifier_options=["--self-window", "200"]) as services:
        api = Api(services.url)
        eventually(lambda: api.ready().get("draft") == "connected")
        whole = api.complete(PROMPTS[0], **request)["choices"][0]
        begin = whole["rounds"][1]["begin"]
        end = next(one for one in whole["token_ids"][begin : begin + 6] if one not in whole["token_ids"][:begin])
        before = samples(api)
        rounds = api.complete(PROMPTS[0], **request, stop_token_ids=[end])["choices"][0]["rounds"]
        grown = samples(api) - before
    assert [round_["drafted"] for round_ in rounds] == [7, 7]
    assert rounds[-1]["tokens"] < rounds[-1]["accepted"]
    given = sum(round_["tokens"] for round_ in rounds)
    assert grown["spire_compared_tokens_total[('decoding', 'speculative')]"] == given
    drafted = sum(min(round_["tokens"], round_["accepted"]) for round_ in rounds)
    assert grown["spire_drafted_output_tokens_total[]"] == drafted < grown["spire_accepted_tokens_total[]"]


def test_by_default_no_round_is_left_plain_and_nothing_unmeasured_is_told(api: Api) -> None:
    api.complete(PROMPTS[0], **LONG)
    counted = samples(api)
    assert counted["spire_compared_rounds_total[('decoding', 'speculative')]"] > 0
    assert counted["spire_compared_rounds_total[('decoding', 'plain')]"] == 0
    absent = ("spire_multiplier_measured", "spire_multiplier_modelled", "spire_price_per_hour")
    assert not [name for name in counted if name.startswith(absent)]


@pytest.mark.thorough
def test_the_modelled_multiplier_is_the_performance_model_s(measuring: Api) -> None:
    """One sequence at a time, so that its load is known."""
    from spire.perf import calibration
    from spire.perf.perf_model import multiplier
    from spire.perf.shapes import DraftShape, Shape

    for prompt in PROMPTS:
        measuring.complete(prompt, **LONG)
    target = Shape(5, 64, 172, heads=8, kv_heads=4, head_dim=8, vocab_size=512)
    draft = DraftShape("spire", Shape(2, 64, 172, heads=8, kv_heads=4, head_dim=8, vocab_size=512), window=16)
    hardware = calibration.load(ROOT / "experiments/results/calibration.json").hardware
    # The last round of a request may be shallower than the others.
    none, all_accepted = (
        [multiplier(target, draft, 1, 100, k, tau, hardware) for k, tau in enumerate(taus, start=1)]
        for taus in ((1.0, 1.0, 1.0, 1.0), (2.0, 3.0, 4.0, 5.0))
    )
    assert 0.9 * min(none) < measuring.metric("spire_multiplier_modelled") < 1.1 * max(all_accepted)


def test_prices_are_told_as_configured(measuring: Api) -> None:
    assert measuring.metric("spire_price_per_hour", service="verifier") == 2.5
    assert measuring.metric("spire_price_per_hour", service="draft") == 0.5


@pytest.mark.thorough
def test_no_request_makes_a_series(measuring: Api) -> None:
    """From the first scrape on: whatever is asked, and whatever has happened."""
    before = set(samples(measuring))
    for attempt in range(20):
        hostile = f'x{attempt}"\n{{}}'
        measuring.http.get(f"/nowhere/{attempt}", headers={"X-Request-Id": f"id{attempt}"})
        measuring.http.get(f"/v1/models/model{attempt}")
        measuring.http.post("/v1/completions/", json={"prompt": "x"})
        measuring.http.request(f"METHOD{attempt}", "/health")
        measuring.http.put("/v1/completions", content=b"x")
        measuring.post(prompt="x", model=hostile, user=hostile)
        measuring.post(prompt="x", speculation={"draft": hostile})
        measuring.post(prompt="x", speculation={"rule": hostile})
        measuring.post(prompt="x" * 5000)
        measuring.post(prompt="x", max_tokens=20, ignore_eos=True, speculation={"k": attempt}, **{hostile: hostile})
    with pytest.raises(httpx.ReadTimeout):
        measuring.http.post("/v1/completions", json=LONG | {"prompt": "x", "max_tokens": 400}, timeout=0.05)
    eventually(lambda: measuring.metric("spire_http_responses_total", path="/v1/completions", status="499") > 0)
    assert set(samples(measuring)) == before
    assert len(before) < 1000


clocks = st.floats(0, 10)


@given(seconds=clocks, models=st.tuples(clocks, clocks, clocks), waited=clocks, queued=clocks, asked=clocks)
def test_a_rounds_parts_sum_to_its_time_or_to_its_models_if_longer(
    seconds: float, models: tuple[float, float, float], waited: float, queued: float, asked: float
) -> None:
    parts = parts_of_round(seconds, models, waited, queued, asked)
    assert parts[:3] == models
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(max(seconds, sum(models)))


def cost_of_a_round(sequences: int, k: int = 4, accepted: int = 3) -> float:
    """Seconds that all three services spend on counting one round."""
    from draft_service.worker import STALENESS_BUCKETS
    from spire.model.cache.contiguous import ContiguousCache
    from spire.model.config import load_model_config
    from spire.service.histogram import Histogram
    from verifier_service.metrics import VerifierMetrics

    metrics = Metrics()
    batch = [Sequence(f"s{index}", [1], Sampling(), 100) for index in range(sequences)]
    verifier = VerifierMetrics(sequences, ContiguousCache(load_model_config(ROOT / "models/target"), sequences, 256))
    staleness = Histogram(STALENESS_BUCKETS)

    def gateway() -> None:
        for sequence in batch:
            metrics.drafted_block(k, accepted, accepted + 1)
            metrics.token_times(sequence, accepted + 1, 1.0)
        metrics.round((0.001,) * len(ROUND_PARTS), sequences, k)
        metrics.compared("speculative", (accepted + 1) * sequences, 0.01)

    def services() -> None:
        verifier.steps.labels("verify").inc()
        verifier.positions.labels("verify").inc((k + 1) * sequences)
        verifier.busy_seconds.labels("verify").inc(0.01)
        for counter in (verifier.tokens, verifier.draft_tokens, verifier.accepted_tokens):
            counter.inc(sequences)
        for counter in (verifier.replays, verifier.activation_bytes):
            counter.inc(1000)
        for _ in batch:
            staleness.observe(0)

    gateway()  # first tokens are another path
    return sum(min(timeit.repeat(work, number=200, repeat=20)) / 200 for work in (gateway, services))


def test_every_service_tells_some_samples_only_when_it_is_asked_for_them(
    stories_dir: Path, stories_draft_dir: Path
) -> None:
    """Writing all others takes time from the rounds of a short measurement."""
    verifier, draft = free_port(), free_port()
    ports = {"verifier_options": ["--metrics-port", str(verifier)], "draft_options": ["--metrics-port", str(draft)]}
    with running(stories_dir, stories_draft_dir, **ports) as services:
        for url, sample in (
            (services.url, "spire_rounds_total"),
            (f"http://127.0.0.1:{verifier}", "spire_verifier_busy_seconds_total"),
            (f"http://127.0.0.1:{draft}", "spire_draft_busy_seconds_total"),
        ):
            whole = httpx.get(f"{url}/metrics").text
            some = httpx.get(f"{url}/metrics", params={"name[]": [sample, "no_such_name"]}).text
            assert {s.name for family in text_string_to_metric_families(some) for s in family.samples} == {sample}
            assert set(some.splitlines()[:1]) < set(whole.splitlines())


def test_counting_takes_no_more_than_a_hundredth_of_a_round() -> None:
    """At 16 sequences, of the bundled pair."""
    with running(ROOT / "models/target", ROOT / "models/draft", dtype="auto") as services:
        api = Api(services.url)
        eventually(lambda: api.ready().get("draft") == "connected", within=60)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda index: api.complete(f"Chapter {index}", max_tokens=48, ignore_eos=True), range(16)))
        assert api.metric("spire_round_sequences_bucket", le="16.0") > 0
        rounds = api.metric("spire_rounds_total")
        buckets = [
            (float(sample.labels["le"]), sample.value)
            for family in text_string_to_metric_families(api.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == "spire_round_duration_seconds_bucket"
        ]
    # The bucket below the one that holds the median: no round was counted as longer than it was.
    median = max([bound for bound, below in buckets if below < rounds / 2], default=buckets[0][0])
    cost = cost_of_a_round(16)
    assert cost <= 0.01 * median, f"{1e6 * cost:.0f} µs of {1e3 * median:.0f} ms"
