"""The dashboards as code: `python deploy/grafana/build.py` writes `deploy/grafana/dashboards/*.json` (a test compares).

`panel` says what a panel is; `overview`, `speculation` and `services` are the panels of the dashboards.

What it does not know: the data source and the gateways, which are variables of the dashboards.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import common as parts, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard as models
from overview import OVERVIEW
from panel import Panel
from services import SERVICES
from speculation import SPECULATION

DIRECTORY = Path(__file__).parent / "dashboards"

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
