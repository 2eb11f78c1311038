"""Encoder outputs that move to host memory and back: what may, what should, and the moves."""
