"""What is declared: export files -> `ExportSpec` -> the planner's records. Needs pydantic."""

from cakegen.spec.export import ExportSpec, parse_export, read_export

__all__ = ["ExportSpec", "parse_export", "read_export"]
