"""The dashboard of services: the time of a round by part, and the memory that each service holds."""

from __future__ import annotations

from panel import OURS, G, Panel, bad_above, quantiles, rate

SERVICES = [
    Panel(
        "Parts of a round",
        "Seconds of a mean round. propose: the draft; verify_forward and verify_sample: the target; draft_wait: "
        "activations on their way; verify_queue: other work of the verifier, prefill above all; wire: between asking "
        "and answer; gateway: the rest. The largest is where to begin.",
        "s",
        {"{{part}}": f"avg by (part) (sum by (instance, part) (spire:round_seconds:mean1m{G}))"},
        stacked=True,
    ),
    Panel("Round time", "Seconds of a round.", "s", quantiles("spire_round_duration_seconds"), bad_above(0.5, 1)),
    Panel(
        "Sequences in a round",
        "Mean size of a batch. Small ones with a queue: --max-batch, or places at the verifier (--max-sequences).",
        "short",
        {"mean": f"{rate('spire_round_sequences_sum')} / ({rate('spire_round_sequences_count')} > 0)"},
    ),
    Panel(
        "Busy",
        "Share of the time in which a model service computes. A verifier near 1 is at its limit: add one. A draft "
        "near 1 makes rounds wait: it needs cores or a device of its own.",
        "percentunit",
        {"verifier {{instance}}": "spire:verifier_busy:ratio1m", "draft {{instance}}": "spire:draft_busy:ratio1m"},
        bad_above(0.9, 0.97),
        most=1,
    ),
    Panel(
        "Positions per second",
        "Fed to the target, by what for. Much prefill beside little verify: long prompts, short answers.",
        "short",
        {"{{kind}}": rate("spire_verifier_positions_total", "", "kind")},
    ),
    Panel(
        "Activations",
        "Bytes a second that the verifier publishes and the draft receives, by carrier. inline on one host: verifier "
        "and draft do not see the same --shared-memory.",
        "Bps",
        {
            "published": rate("spire_verifier_activation_bytes_total", ""),
            "received {{carrier}}": rate("spire_draft_activation_bytes_total", "", "carrier"),
        },
    ),
    Panel(
        "Draft staleness",
        "Verified positions that had not arrived at the draft when a request did. A few are normal, the "
        "draft waits for them (--wait-ms); many mean a slow wire or a draft that does not keep up.",
        "short",
        quantiles("spire_draft_staleness_positions", ""),
        bad_above(12, 24),
    ),
    Panel(
        "Fallbacks",
        "Share of the blocks to be drafted that were decoded plainly. The panel beside says why.",
        "percentunit",
        {"{{instance}}": f"spire:fallbacks:ratio1m{G}"},
        bad_above(0.01, 0.05),
        most=1,
    ),
    Panel(
        "Fallbacks by reason",
        "Blocks a second. draft_absent, draft_lost: is it running? draft_timeout: too slow for --draft-deadline. "
        "draft_behind: activations come too late. draft_error: it refuses, usually for want of places "
        "(--max-sequences).",
        "ops",
        {"{{reason}}": rate("spire_fallbacks_total", by="reason")},
    ),
    Panel(
        "Circuit",
        "Seconds for which a peer is left alone whose answer came too late, twice as long each time. Not 0: that "
        "service hangs, or its deadline is too short for its work.",
        "s",
        {"{{peer}} of {{instance}}": f"spire_circuit_seconds{G}"},
        bad_above(0.1, 1),
    ),
    Panel(
        "Replays",
        "Sequences started again after a loss, and sinks and windows sent to drafts again. Without restarts of "
        "services both rest near the rate of new sequences, the first at 0.",
        "ops",
        {
            "sequences": rate("spire_replays_total"),
            "of the draft's memory": rate("spire_verifier_replays_total", ""),
        },
    ),
    Panel(
        "Sequences lost",
        "Started again from their tokens: the verifier restarts, its stream breaks, or it preempts. Each costs a "
        "prefill.",
        "ops",
        {"{{instance}}": rate("spire_replays_total", by="instance")},
        bad_above(0.01, 0.1),
    ),
    Panel(
        "Cache",
        "Share of the verifier's cache and places that live sequences have. Full: new ones wait, then the youngest are "
        "preempted. Raise --cache-gb, or lower --max-sequences.",
        "percentunit",
        {
            "cache {{instance}}": "spire:cache_live:ratio",
            "places {{instance}}": "spire_verifier_slots_used / spire_verifier_slots",
        },
        bad_above(0.85, 0.95),
        most=1,
    ),
    Panel(
        "Preemptions",
        "Sequences sent away because memory ran out, a second. They come again with the same text; the work is done "
        "twice.",
        "ops",
        {"{{instance}}": rate("spire_verifier_preempted_sequences_total", "", "instance")},
        bad_above(0.01, 0.1),
    ),
    Panel(
        "Draft memory per sequence",
        "Bytes that the draft holds for one sequence, whatever its context.",
        "bytes",
        {"{{job}}": "max by (job) (spire_draft_state_bytes_per_sequence)"},
    ),
    Panel(
        "Memory",
        "Resident memory of each process.",
        "bytes",
        {"{{job}} {{instance}}": f"process_resident_memory_bytes{OURS}"},
    ),
    Panel(
        "Memory of what is allowed",
        "Share of what the container or machine has. The kernel ends what takes more: lower --cache-gb or "
        "--max-sequences.",
        "percentunit",
        {"{{job}} {{instance}}": f"process_resident_memory_bytes{OURS} / spire_memory_limit_bytes"},
        bad_above(0.8, 0.9),
        most=1,
    ),
]
