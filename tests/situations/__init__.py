"""Hostile and unlucky situations, one file a kind: `situations()` gives each its name and a function.

A function gets an empty folder, which also holds its compile cache, makes the situation in it, and returns where it was
survived. Any exception is a failure. `tests/support/try_situations.py` runs them and writes the figures.
"""
