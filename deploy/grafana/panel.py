"""A panel: a title, what to do about it, a unit, a colour for each range of values, and queries by legend.

Colours are the thresholds that tests cross with faults: a panel that was never seen to change colour says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

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
