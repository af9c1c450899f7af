"""Traces of a run, and how they are drawn."""
