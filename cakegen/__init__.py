"""cakegen: declarative specs to GPU kernels, and a runtime that launches them."""

__version__ = "0.1.0"
