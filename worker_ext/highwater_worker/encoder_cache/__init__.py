"""The encoder cache: its entries, when they were seen, whether its pools are asleep."""
