"""Makes the Grafana dashboards, the alerts and the chart's schema: `python -m helm.source` writes them all.

::

    __main__ ──► dashboards ──► server.yaml, fleet.yaml (rows and panels), grafana.yaml (Grafana's constant JSON)
           ├──► alerts.yaml
           └──► values.yaml (what a value may be), and `config` from highwater.server.settings

The recording rules in `alerts/` are written by hand. Nothing in `highwater` imports this; it is in no wheel, and not in
the packaged chart.
"""
