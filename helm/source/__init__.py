"""Makes the Grafana dashboards and the alerts: `python -m helm.source` writes them all.

::

    __main__ ──► board ──► server.yaml, fleet.yaml (what is on them)
           │       └─────► panels ──► metrics (names, labels, HELP texts as exported)
           └──► rules ──► alerts.yaml

They are written to `dashboards/`, beside this package; the chart and people without one load the same files. The
recording rules in `alerts/` are written by hand. Nothing in `highwater` imports this, and it is in no wheel.
"""
