"""The HTTP face: thin routers over what ``main`` wires. They validate, call, and shape the answer."""
