"""Makes values.schema.json of the chart: `python -m helm.generator` writes it.

::

    __main__ ──► schema (what a value may be; `config` from highwater.server.settings)

Nothing in `highwater` imports this, and it is in no wheel and not in the packaged chart.
"""
