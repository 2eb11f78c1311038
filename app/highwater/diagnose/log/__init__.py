"""The engine's log: its lines, the known messages in them, its starts, and a failed allocation's figures."""
