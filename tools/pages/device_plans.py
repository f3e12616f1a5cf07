"""Plans of public models on devices: from docs/data/device_plans.json."""

from __future__ import annotations

import json

from pages import ROOT, table


def device_plans() -> str:
    """Return a row for each model: its memory, and tokens a second at most on each device."""
    record = json.loads((ROOT / "docs" / "data" / "device_plans.json").read_text())
    titles: dict[str, str] = {}
    rows: dict[str, list[str]] = {}
    for plan in record["plans"]:
        titles[plan["device"]] = f"`{plan['device']}`"
        found = rows.setdefault(plan["model"], [f"{plan['memory'] / 2**30:.1f}"])
        found.append(f"{plan['tokens_per_second']:,.0f}" if plan["fits"] else "does not fit")
    head = ["shape", "memory, GiB", *titles.values()]
    return table(head, [[name, *values] for name, values in rows.items()])


PARTS = {"device-plans": device_plans}
