"""Launches: of a plan, of a test case, of files; one after another or side by side."""
