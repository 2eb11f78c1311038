"""Where values.schema.json and the chart's README.md are made: `python -m helm.generator` writes both.

::

    __main__ ──► schema (what a value may be; `config` from highwater.settings) ──► settings
             └─► readme (values.yaml and its comments)

Nothing in `highwater` imports this, and it is in no wheel and not in the packaged chart.
"""
