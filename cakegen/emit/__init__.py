"""Specifications -> text -> tree. `render_tree` is pure; only `write_tree` and `write_exports` write."""

from cakegen.emit.tree import RenderedTree, render_tree
from cakegen.emit.write import TreeDifference, check_tree, compare_tree, shared_files, write_exports, write_tree

__all__ = [
    "RenderedTree",
    "TreeDifference",
    "check_tree",
    "compare_tree",
    "render_tree",
    "shared_files",
    "write_exports",
    "write_tree",
]
