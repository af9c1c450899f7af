"""Families of instructions as Python expressions, by topic; `expressions` puts their tables together."""
