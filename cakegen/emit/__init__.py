"""Specifications -> text -> tree. `render_tree` is pure; only `write_tree` writes."""

from cakegen.emit.tree import render_tree
from cakegen.emit.write import TreeDifference, check_tree, compare_tree, write_tree

__all__ = ["TreeDifference", "check_tree", "compare_tree", "render_tree", "write_tree"]
