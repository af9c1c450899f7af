"""The text of an export that does not exist yet, with a comment at each line. Imports errors and the parser."""

from __future__ import annotations

import re

from cakegen.errors import SpecError

_TEXT = """\
# What this model is. Its rules are those of exports/rules, which say what each means; `cakegen plan` prints which one
# chose what. Write its programs with `cakegen export FILE --dest DIR`, where FILE is this one.

# prefix of every generated file and of every decode key
name = "{name}"

# what it computes, a file of exports/blocks: `cakegen show --block FILE` prints it as formulas with these widths
block = "latent_moe"

# Widths in elements. Weight rows fill whole tiles of 128; every TP degree divides latent and shared_intermediate.
[model]
hidden = 4096
# the width in which the routed experts work, between two dense projection groups
latent = 1024
# rows of the router
experts = 256
# intermediate width of the shared expert; a rank holds this over its TP degree, in whole 64 columns
shared_intermediate = 2048
# added to the mean of squares of the RMS norm
norm_eps = 1e-5
# SiTU(g, u) = beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)
situ_beta = 4.0
situ_linear_beta = 25.0

# The largest request that resolves to a program: tokens, and un-reduced partials of the routed experts.
[requests]
max_tokens = 4096
max_partials = 8

# An architecture a table (sm_90a, sm_100a, sm_103a). Without sm_counts, programs for its known parts are written.
[[targets]]
arch = "sm_90a"
tp_degrees = [1, 4, 8]
sm_counts = [132]

# Another value of a shared rule, or `false` to leave it out:
# [hopper.decode]
# max_stages = 10
"""


def draft_export(name: str) -> str:
    """A commented export of a small block, to be edited.

    Raises
    ------
    SpecError
        The name can't be one of generated files.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,47}", name):
        raise SpecError(
            f"name {name!r}: an export's name is a lower-case letter, then up to 47 of a-z, 0-9 and _; it prefixes"
            " files and symbols of C++"
        )
    return _TEXT.format(name=name)
