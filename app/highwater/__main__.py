"""``python -m highwater``: the command line, also where the console script is on no path."""

from highwater.terminal.cli import main

main(prog_name="highwater")
