"""`python -m helm.source`: writes the dashboards and the rules. `--help` tells what can be set."""

from __future__ import annotations

import argparse
from pathlib import Path

from helm.source.fleet_dashboard import fleet_dashboard
from helm.source.rules import RUNBOOK_BASE, recording_file, rule_file
from helm.source.server_dashboard import server_dashboard

HELM = Path(__file__).resolve().parents[1]


def files(runbook_base: str = RUNBOOK_BASE) -> dict[str, str]:
    """Every file that is generated, by its path under `helm/`, and its text."""
    return {
        "dashboards/highwater-server.json": server_dashboard(),
        "dashboards/highwater-fleet.json": fleet_dashboard(),
        "alerts/highwater.rules.yaml": rule_file(runbook_base),
        "alerts/highwater-recording.rules.yaml": recording_file(),
    }


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(prog="python -m helm.source", description="Write the dashboards and the rules.")
    parser.add_argument("--out", type=Path, default=HELM, help="the folder to write to (default: %(default)s)")
    base = "what runbook_url begins with (default: %(default)s, a path in the repository)"
    parser.add_argument("--runbook-base", default=RUNBOOK_BASE, help=base)
    arguments = parser.parse_args()
    for name, text in files(arguments.runbook_base).items():
        path = arguments.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
