"""Making a release: its version, its files. RELEASING.md says in which order. Nothing here publishes anything."""
