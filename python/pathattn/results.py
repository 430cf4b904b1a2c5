"""What the demo, its report and the state-tracking results have in common: names, looks, and how a file of results is written.

A part of programs that are run by themselves, and like them not of the package that it lies in.
"""

import json
import os

# name, colour (Okabe and Ito's, told apart by every kind of sight), marker, line, hatch: the last three tell them apart in grey
STYLES = {
    "rope": ("RoPE", "#4d4d4d", "D", ":", "xxx"),
    "nope": ("NoPE", "#CC79A7", "v", "-.", "||"),
    "sba": ("SBA", "#E69F00", "P", (0, (3, 1, 1, 1)), "\\\\\\"),
    "fox": ("FoX", "#009E73", "^", "--", "..."),
    "path": ("PaTH", "#0072B2", "o", "-", ""),
    "path_fox": ("PaTH-FoX", "#D55E00", "s", "-", "///"),
}
TEST_SETS = {  # of flip-flop
    "in_distribution": "in distribution\n(80 % ignored)",
    "sparse": "sparse\n(98 % ignored)",
    "dense": "dense\n(10 % ignored)",
}


def write_json(path, value):
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)
