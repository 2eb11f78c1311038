"""The engine: every word that is said to it, what it can do, its lives, and how it is."""
