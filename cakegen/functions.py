"""Leaf module: activations and norms that a block may name, with their parameters, formulas and rounding points."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A number that a function is given: above 0, below `below`; `meaning` is what programs say of it."""

    name: str
    meaning: str
    below: float = 1e6


@dataclass(frozen=True)
class Activation:
    """What is done with a product before it is stored.

    Parameters
    ----------
    operands
        `("g", "u")`: gated, of gate rows and as many up rows. `("u",)`: not.
    rounding
        Where a result is rounded to bf16; between these points all is fp32.
    functor
        What programs call: a struct of `templates/kernels/activation.cuh`; empty: no body has it.
    tolerance
        atol = rtol of a result against fp64 that is rounded nowhere. Rounding to bf16 is up to 2^-8 off, relative.
    """

    operands: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    formula: str
    rounding: str
    functor: str = ""
    tolerance: float = 1e-2

    @property
    def gated(self) -> bool:
        """Whether its weight has gate rows, then up rows."""
        return len(self.operands) == 2


@dataclass(frozen=True)
class RowNorm:
    """What is done with a whole row `r` of `N` elements; `w` is its weight, `m` the mean of squares.

    `in_bodies`: bodies of programs have it, behind a sum of partials.
    """

    parameters: tuple[Parameter, ...]
    formula: str
    rounding: str
    in_bodies: bool = False


_EPS = Parameter("eps", "added to the mean of squares", below=1.0)
_AT_THE_END = "once, at the end"

ACTIVATIONS = {
    "situ": Activation(
        ("g", "u"),
        (Parameter("beta", "bound of the gate branch"), Parameter("linear_beta", "bound of the linear branch")),
        "beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)",
        _AT_THE_END,
        functor="Situ",
    ),
    "swiglu": Activation(("g", "u"), (), "g * sigmoid(g) * u", _AT_THE_END, functor="Swiglu"),
    "geglu_tanh": Activation(
        ("g", "u"),
        (),
        "0.5 * g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))) * u",
        _AT_THE_END,
        functor="GegluTanh",
    ),
    # the square doubles what u is off, and is rounded itself: 3 * 2^-8 = 1.2e-2
    "relu2": Activation(("u",), (), "max(u, 0)^2", "u, then the square", functor="Relu2", tolerance=2e-2),
}
NORMS = {
    "kimi_rms": RowNorm(
        (_EPS,), "w * (r / sqrt(m + eps))", "r, then r / sqrt(m + eps), then the product with w", in_bodies=True
    ),
    "centred_rms": RowNorm((_EPS,), "(1 + w) * (r / sqrt(m + eps))", "r, then once, at the end"),
}
