"""``python -m aot_backward.cli``: the same as ``aot-backward``, with a chosen interpreter."""

from . import main

main(prog_name="aot-backward")
