"""Pictures of the dashboards without a Grafana: `python -m tests.observability.pictures`, or `make pictures`.

::

    __main__ ──► draw ──► the dashboards' JSON, asked of ──► store ──► a real Prometheus ──► scene ──► server

The servers are simulated, hour by hour, and so are vLLM's own families; the sidecar's families come from its real
exporter, and every query is answered by a real Prometheus, with our recordings and alerts evaluated over the scene.
"""
