"""The dashboard of clients: requests, speed, queue, errors."""

from __future__ import annotations

from panel import ALL_UP, COMPLETIONS, OURS, G, Panel, bad_above, quantiles, rate

OVERVIEW = [
    Panel(
        "Services",
        "1: the service tells Prometheus its metrics. Where one does not, nothing else is known of it: is it running, "
        "and on the port that prometheus.yml names?",
        "short",
        {"{{job}} {{instance}}": f"up{OURS}"},
        ALL_UP,
        most=1,
    ),
    Panel(
        "Peers",
        "1: the gateway can give this service work. Without a verifier requests get 503; without a draft decoding is "
        "plain. The gateway's log says why (`unreachable`, `not serving`).",
        "short",
        {"{{peer}} of {{instance}}": f"spire_peer_up{G}"},
        ALL_UP,
        most=1,
    ),
    Panel(
        "Requests",
        "Answers by HTTP status. 429: the queue or a quota is full. 5xx: see Errors.",
        "reqps",
        {"{{status}}": f"{rate('spire_http_responses_total', COMPLETIONS, 'status')} > 0"},
    ),
    Panel(
        "Tokens per second",
        "Generated tokens, and prompt tokens prefilled, of all gateways that are chosen.",
        "short",
        {"generated": f"sum(spire:tokens:rate1m{G})", "prompt": rate("spire_prompt_tokens_total")},
    ),
    Panel(
        "Time to first token",
        "From arrival to the first token. High with a high queue time: add capacity. High without: long prompts; "
        "--token-budget is how much of them one step takes.",
        "s",
        quantiles("spire_time_to_first_token_seconds"),
        bad_above(1, 2.5),
    ),
    Panel(
        "Inter-token latency",
        "Seconds for each token after the first. Where it is high, the round's parts in Services say where the time "
        "goes; fewer sequences at once (--max-batch) are each faster.",
        "s",
        quantiles("spire_inter_token_latency_seconds"),
        bad_above(0.1, 0.2),
    ),
    Panel(
        "Queue",
        "Choices by state. Waiting ones that stay: more is asked than is served. Add a verifier, or refuse earlier "
        "with --max-queue-seconds.",
        "short",
        {"{{state}}": f"sum by (state) (spire_sequences_now{G})"},
    ),
    Panel(
        "Waiting",
        "Choices in the queue. More than a few for long: as for Queue.",
        "short",
        {"waiting": 'sum(spire_sequences_now{instance=~"$gateway",state="waiting"})'},
        bad_above(4, 16),
    ),
    Panel(
        "Queue time",
        "From arrival to admission, which waits for a place at the verifier.",
        "s",
        quantiles("spire_queue_seconds"),
        bad_above(1, 2.5),
    ),
    Panel(
        "Errors",
        "Share of the completions answered with a 5xx. Each is in the gateway's log with its request id, which is in "
        "the model services' logs too.",
        "percentunit",
        {
            "5xx": rate("spire_http_responses_total", COMPLETIONS + ',status=~"5.."')
            + f" / ({rate('spire_http_responses_total', COMPLETIONS)} > 0)"
        },
        bad_above(0.001, 0.01),
        most=1,
    ),
    Panel(
        "Refused",
        "Requests answered with 429: the queue is full or a key is over its quota. The message of the answer says "
        "which.",
        "reqps",
        {"429": rate("spire_http_responses_total", COMPLETIONS + ',status="429"')},
        bad_above(0.01, 0.1),
    ),
    Panel(
        "Choices ended",
        "By reason. abort: the client left. error: see Errors.",
        "ops",
        {"{{finished_reason}}": rate("spire_sequences_total", by="finished_reason")},
    ),
]
