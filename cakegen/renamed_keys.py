"""Leaf module: what keys of Hopper's decode programs are called today that were spelled as the published ones are."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("renamed_keys.tsv")


@functools.cache
def renamed_keys() -> Mapping[str, str]:
    """Earlier key -> today's."""
    with TABLE.open(encoding="utf-8", newline="") as stream:
        return {row["old"]: row["new"] for row in csv.DictReader(stream, delimiter="\t")}
