"""Microseconds of a program on a device that need not be there. docs/predict.md says what is modelled, and how well."""

from cakegen.timing.figures import DeviceFigures, Figure, device_names, load_device
from cakegen.timing.measured import COLUMNS, compare, ranked_right, read_rows, same_programs, summary
from cakegen.timing.predict import BETTER, Prediction, better, predict

__all__ = [
    "BETTER",
    "COLUMNS",
    "DeviceFigures",
    "Figure",
    "Prediction",
    "better",
    "compare",
    "device_names",
    "load_device",
    "predict",
    "ranked_right",
    "read_rows",
    "same_programs",
    "summary",
]
