"""What an argument must be before any of it is read: a strided tensor, a whole number. Imports torch and errors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping

import torch

from cakegen.errors import OperandError, OperandKindError


def check_tensors(stage: str, inputs: Mapping[str, object], outputs: Mapping[str, object]) -> None:
    """Refuse what has no memory of its own that a kernel could read or write as it stands.

    Sparse tensors have no strides, and a negated view (`torch.imag` and its kin) holds other values than it shows. An
    output that autograd records can't be written behind its back.

    Raises
    ------
    OperandKindError
        An operand is no tensor.
    OperandError
        It has no memory as it stands; the message names it.
    """
    for name, value in (*inputs.items(), *outputs.items()):
        if not isinstance(value, torch.Tensor):
            got = type(value).__name__
            raise OperandKindError(
                f"{stage}: {name} must be a torch.Tensor; got {got}. Convert it, e.g. torch.from_numpy."
            )
        if value.layout != torch.strided:
            raise OperandError(
                f"{stage}: {name} must be a strided tensor; got layout {value.layout}. Call .to_dense()."
            )
        if value.is_neg():
            raise OperandError(
                f"{stage}: {name} must be memory that holds its values; got a negated view of other memory. Call "
                ".resolve_neg()."
            )
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise OperandError(
                f"{stage}: {name} must be an output without a gradient; got one that autograd records, and no gradient "
                "would flow through it. Detach it, or run under torch.no_grad()."
            )


def check_whole(stage: str, name: str, value: object) -> int:
    """A whole number as an int; numpy's and torch's own count, a bool does not.

    Raises
    ------
    OperandKindError
        It is none.
    """
    if not isinstance(value, bool) and hasattr(type(value), "__index__"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise OperandKindError(f"{stage}: {name} must be a whole number; got {type(value).__name__} {str(value)[:40]!r}.")


def check_wholes(stage: str, name: str, values: object) -> tuple[int, ...]:
    """Several whole numbers; see `check_whole`.

    Raises
    ------
    OperandKindError
        One of them is none, or it is one value where several are asked for.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        got = f"{type(values).__name__} {str(values)[:40]!r}"
        raise OperandKindError(f"{stage}: {name} must be whole numbers in a tuple, list or range; got {got}.")
    return tuple(check_whole(stage, name, value) for value in values)


def check_flag(where: str, name: str, value: object) -> bool:
    """`value`, which must be True or False: a text such as "no" would else count as True.

    Raises
    ------
    OperandKindError
        It is none of the two.
    """
    if not isinstance(value, bool):
        raise OperandKindError(f"{where}: {name} must be True or False; got {value!r}.")
    return value
