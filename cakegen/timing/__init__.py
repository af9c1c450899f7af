"""Microseconds of a program on a device that need not be there. docs/predict.md says what is modelled, and how well."""
