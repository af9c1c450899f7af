"""Measures the programs on a device, beside stock chains and limits, and reads what was measured.

`rows`, `stats`, `records`, `compare`, `table` and `plots` need no torch: they work on recorded results anywhere.
`session.run_bench` measures; its file's header states the protocol. May import every other layer but `cli`; never
pydantic.
"""
