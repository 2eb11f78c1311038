"""``highwater top``: the report live at a terminal."""
