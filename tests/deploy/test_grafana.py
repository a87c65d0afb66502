"""The dashboard asks for metrics that exist, and shows all of them; a running server is asked in tests/system."""

import json
import re
from pathlib import Path

from cluster.metrics import HELP
from router.admission import Admission

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/choral.json"


def dashboard_metrics() -> set[str]:
    """Every metric named in a query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {name for p in panels for t in p["targets"] for name in re.findall(r"choral_\w+", t["expr"])}


def test_every_metric_asked_for_is_exported_and_most_exported_ones_are_shown():
    exported = {f"choral_{name}" for name in HELP} | set(re.findall(r"^choral_\w+", Admission(1).metrics(), re.M))
    asked = dashboard_metrics()
    assert asked <= exported
    assert len(asked) > 20


def test_counters_are_shown_as_rates_and_gauges_as_they_are():
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for expression in (target["expr"] for target in panel["targets"]):
            for name in re.findall(r"choral_\w+", expression):
                counter = name.endswith("_total") and name != "choral_kv_blocks_total"
                assert (f"rate({name}[" in expression) == counter, expression


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [(x, y) for p in panels for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
             for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])]  # fmt: skip
    assert len(set(cells)) == len(cells)
