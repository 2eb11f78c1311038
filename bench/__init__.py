"""The figures in docs/figures.md, measured. Nothing here is a test: a goal that is missed is printed as missed."""
