"""The dashboards as code: `python deploy/grafana/build.py` writes `deploy/grafana/dashboards/*.json` (a test compares).

A panel is a title, what to do about it, a unit, a colour for each range of values, and queries by legend. Colours are
the thresholds that tests cross with faults: a panel that was never seen to change colour says nothing.

What it does not know: the data source and the gateways, which are variables of the dashboards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

DIRECTORY = Path(__file__).parent / "dashboards"

GREEN, YELLOW, RED = "green", "yellow", "red"
# From the lowest values on: a colour, and from where the next one begins.
Colours = tuple[tuple[float | None, str], ...]
NEUTRAL: Colours = ((None, GREEN),)


def bad_above(yellow: float, red: float) -> Colours:
    return (None, GREEN), (yellow, YELLOW), (red, RED)


def bad_below(red: float, yellow: float) -> Colours:
    return (None, RED), (red, YELLOW), (yellow, GREEN)


ALL_UP: Colours = ((None, RED), (1, GREEN))


@dataclass(frozen=True)
class Panel:
    """`queries` by legend. `unit` is Grafana's name; `most` and `least` end the axis where values cannot go further."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    colours: Colours = NEUTRAL
    least: float = 0
    most: float | None = None
    stacked: bool = False


# Everything of the gateways that are looked at.
G = '{instance=~"$gateway"}'
OURS = '{job=~"gateway|verifier|draft"}'
COMPLETIONS = 'instance=~"$gateway",path=~"/v1/.*completions"'


def rate(metric: str, labels: str = 'instance=~"$gateway"', by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(of: float, metric: str, labels: str = 'instance=~"$gateway"') -> str:
    return f"histogram_quantile({of}, {rate(metric + '_bucket', labels, 'le')})"


def quantiles(metric: str, labels: str = 'instance=~"$gateway"') -> dict[str, str]:
    return {f"p{100 * of:g}": quantile(of, metric, labels) for of in (0.5, 0.95, 0.99)}


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

SPECULATION = [
    Panel(
        "τ",
        "Mean tokens of a verified block: the accepted ones and one more. 1 is plain decoding. Where it falls: other "
        "text than the draft was trained on, or a draft that is not what it was (compare `spire eval acceptance`).",
        "short",
        {"{{instance}}": f"spire:tau:ratio1m{G}"},
        bad_below(1.3, 2),
        least=1,
    ),
    Panel(
        "Acceptance rate",
        "Of the draft tokens that were verified, those that stood. A deeper k lowers it without harm: judge the first "
        "position in the panel beside.",
        "percentunit",
        {"{{instance}}": f"spire:acceptance:ratio1m{G}"},
        most=1,
    ),
    Panel(
        "Acceptance by position",
        "Share of the blocks whose draft token at this position, and all before it, stood. The first is what the "
        "draft is worth; a steep fall says that k is too deep.",
        "percentunit",
        {"{{position}}": 'spire:acceptance_at:ratio1m{instance=~"$gateway",position=~"[0-7]"}'},
        bad_below(0.4, 0.6),
        most=1,
    ),
    Panel(
        "Draft tokens per second",
        "Verified and accepted. Between them lies work that was done for nothing.",
        "short",
        {"drafted": rate("spire_draft_tokens_total"), "accepted": rate("spire_accepted_tokens_total")},
    ),
    Panel(
        "Share of the output from drafts",
        "Of the generated tokens, those that the draft guessed: 1 − 1/τ where every block is drafted.",
        "percentunit",
        {"{{instance}}": f"spire:drafted_output:ratio1m{G}"},
        most=1,
    ),
    Panel(
        "k of rounds",
        "Rounds by the draft tokens of their deepest block. 0: plain, because speculation would lose, no draft is "
        "there, or a sample is taken.",
        "ops",
        {"{{k}}": f"{rate('spire_rounds_at_depth_total', by='k')} > 0"},
        stacked=True,
    ),
    Panel(
        "k chosen",
        "The depth that was chosen last for requests that leave it to the gateway.",
        "short",
        {"{{instance}}": f"spire_speculation_depth{G}"},
    ),
    Panel(
        "Multiplier",
        "Tokens a second with speculation over those without: measured against rounds that were left plain "
        "(--plain-share), beside what the performance model says of the same rounds (--calibration). Below 1 "
        "speculation loses: take a fixed --k away. Far below the model: something beside the models takes time, see "
        "the round's parts.",
        "short",
        {
            "measured {{instance}}": f"spire:multiplier_measured:ratio10m{G}",
            "modelled {{instance}}": f"spire:multiplier_modelled:mean10m{G}",
        },
        bad_below(1, 1.2),
    ),
    Panel(
        "Cost of a million tokens",
        "All devices by the hour (--price, --draft-price) over the tokens of all gateways; plain: what they would "
        "have cost without a draft, by the measured multiplier. Idle devices cost too: compare under load.",
        "short",
        {
            "with speculation": "spire:cost_per_million_tokens:rate5m",
            "plain": "spire:cost_per_million_tokens_plain:rate5m",
        },
    ),
]

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
        "Verified positions that had not arrived at the draft when a guess was asked for. A few are normal, the "
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
        "Blocks a second. draft_absent, draft_lost: is it running? draft_timeout: too slow for --propose-deadline. "
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

DASHBOARDS = {
    "overview": ("Spire / Overview", "What clients get: requests, speed, queue, errors.", OVERVIEW),
    "speculation": ("Spire / Speculation", "Whether speculation pays, and why.", SPECULATION),
    "services": ("Spire / Services", "Where the time of a round goes, and what each service holds.", SERVICES),
}

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def build(name: str) -> str:
    """One dashboard's JSON."""
    title, description, panels = DASHBOARDS[name]
    board = (
        dashboard.Dashboard(title)
        .uid(f"spire-{name}")
        .description(description)
        .tags(["spire"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("gateway")
            .label("Gateway")
            .datasource(_SOURCE)
            .query("label_values(spire_rounds_total, instance)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
        )
        .link(
            dashboard.DashboardLink("Spire").type(models.DashboardLinkType.DASHBOARDS).tags(["spire"]).keep_time(True)
        )
    )
    for number, panel in enumerate(panels, 1):
        board = board.with_panel(_panel(panel, number))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _panel(panel: Panel, number: int) -> timeseries.Panel:
    steps = [models.Threshold(value=value, color=colour) for value, colour in panel.colours]
    built = (
        timeseries.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(panel.least)
        .span(8)
        .height(8)
        .line_width(2)
        .fill_opacity(40 if panel.stacked else 5)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .legend(parts.VizLegendOptions().show_legend(True))
        .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.most is not None:
        built = built.max(panel.most)
    if len(steps) > 1:
        style = parts.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED)
        built = built.thresholds_style(style)
    if panel.stacked:
        built = built.stacking(parts.StackingConfig().mode(common.StackingMode.NORMAL))
    for index, (legend, expression) in enumerate(panel.queries.items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index)).range()
        built = built.with_target(query)
    return built


def main() -> None:
    for name in DASHBOARDS:
        (DIRECTORY / f"{name}.json").write_text(build(name))


if __name__ == "__main__":
    main()
