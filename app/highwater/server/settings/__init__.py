"""The settings: what there is to set, and where the values come from."""
