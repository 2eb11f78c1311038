"""Where the Grafana dashboards and the Prometheus rules are made: `python -m helm.source` writes them all.

::

    __main__ ──► server_dashboard, fleet_dashboard ──► panels ──► metrics (names, units and HELP texts as exported)
             └─► rules ──► alerts, recording ───────────────────► metrics

What is written lies beside this package, in `dashboards/` and `alerts/`; the chart and people without one load the same
files. Nothing in `app` imports this, and it is in no wheel.
"""
