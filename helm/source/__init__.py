"""Makes the Grafana dashboards and the alerts: `python -m helm.source` writes them all.

::

    __main__ ──► board ──► server.yaml, fleet.yaml (their rows and panels)
           │       └─────► panels ──► grafana.yaml (Grafana's constant JSON), metrics (names and HELP texts)
           └──► rules ──► alerts.yaml

They are written to `dashboards/`, beside this package; the chart and people without one load the same files. The
recording rules in `alerts/` are written by hand. Nothing in `highwater` imports this, and it is in no wheel.
"""
