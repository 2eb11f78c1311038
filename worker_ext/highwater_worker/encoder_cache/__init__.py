"""The encoder cache: the dict that can spill, its entries, and whether the engine's pools are asleep."""
