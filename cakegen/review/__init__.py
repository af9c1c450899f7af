"""What a change does to the generated programs: two trees compared by logical key, with the code they compile to.

Imports errors, registry and compile. Reads git revisions and files; never plans, emits or launches.
"""

from cakegen.review.compare import ExportReview, compare_trees, narrow_review
from cakegen.review.cost import CostChange, count_compilations, measure_costs
from cakegen.review.html import render_html
from cakegen.review.markdown import render_markdown
from cakegen.review.report import Review
from cakegen.review.text import render_text
from cakegen.review.trees import Tree, read_revision, read_trees

__all__ = [
    "CostChange",
    "ExportReview",
    "Review",
    "Tree",
    "compare_trees",
    "count_compilations",
    "measure_costs",
    "narrow_review",
    "read_revision",
    "read_trees",
    "render_html",
    "render_markdown",
    "render_text",
]
