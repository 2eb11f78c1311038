"""The half that would compile."""

from triton.backends.compiler import BaseBackend


class NothingCompiled(BaseBackend):
    supports_target = hash = parse_options = add_stages = load_dialects = get_module_map = None
