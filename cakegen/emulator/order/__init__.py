"""The order of accesses: clocks, who touched what last, and what fences do."""
