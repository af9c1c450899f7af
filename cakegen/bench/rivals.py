"""Stock chains that compute the same rows: torch, cuBLAS and torch.compile. Imports torch and this package.

To add one, write a function from a case, its elementwise kernels and its products to an `Arm`, and enter it in
`RIVALS`. It may raise whatever it likes where it can't run; the row records the message. All buffers are made when the
arm is built. To add a library whose GEMMs take cuBLAS's place in these chains, see `libraries.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from cakegen.bench.arms import Arm
from cakegen.bench.operands import Case, FrontWeights, TailWeights, rival_tolerances
from cakegen.bench.pointwise import Pointwise
from cakegen.bench.products import CUBLAS, Cublas
from cakegen.model import ModelDims
from cakegen.operands import returned

Builder = Callable[[Case, Pointwise, Cublas], Arm]
SEPARATE_FP32 = "separate_fp32"
"""Reads the weights in place and rounds where the contract does: what a chain costs that could stand in for us."""


def front_separate(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """Three GEMMs (router, down, gate and up), then the activation."""
    weights, dims, x = _front(case), case.dims, case.inputs["x"]
    logits, latent = case.empty(dims.experts, torch.float32), case.empty(dims.latent)
    gate_up, shared_act = case.empty(weights.gate_up.shape[0]), case.shared_act_room()

    def call() -> None:
        products.route(x, weights.gate, logits)
        products.multiply(x, weights.down, latent)
        products.multiply(x, weights.gate_up, gate_up)
        pointwise.activate(gate_up, shared_act)

    return Arm(call, returned(case.dims.rows_stage.outputs, (logits, latent, shared_act)))


def front_separate_fp32(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """As `front_separate`, but gate and up come in fp32, so that shared_act is rounded once, as a program's is."""
    weights, dims, x = _front(case), case.dims, case.inputs["x"]
    logits, latent = case.empty(dims.experts, torch.float32), case.empty(dims.latent)
    gate_up, shared_act = case.empty(weights.gate_up.shape[0], torch.float32), case.shared_act_room()

    def call() -> None:
        products.route(x, weights.gate, logits)
        products.multiply(x, weights.down, latent)
        products.multiply_fp32(x, weights.gate_up, gate_up)
        pointwise.activate(gate_up, shared_act)

    return Arm(call, returned(case.dims.rows_stage.outputs, (logits, latent, shared_act)))


def front_joined(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """The router, one GEMM over `[down; gate; up]`, then the activation; latent stays a range of the GEMM's columns."""
    weights, dims, x = _front(case), case.dims, case.inputs["x"]
    rows = weights.joined[dims.experts :]
    logits, joined = case.empty(dims.experts, torch.float32), case.empty(rows.shape[0])
    shared_act = case.shared_act_room()
    latent, gate_up = joined[:, : dims.latent], joined[:, dims.latent :]

    def call() -> None:
        products.route(x, weights.gate, logits)
        products.multiply(x, rows, joined)
        pointwise.activate(gate_up, shared_act)

    return Arm(call, returned(case.dims.rows_stage.outputs, (logits, latent, shared_act)))


def front_joined_fp32(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """One GEMM over `[gate; down; gate; up]` with fp32 output, then one kernel that activates and rounds latent."""
    weights, dims, x = _front(case), case.dims, case.inputs["x"]
    joined = case.empty(weights.joined.shape[0], torch.float32)
    latent, shared_act = case.empty(dims.latent), case.shared_act_room()
    logits, rest = joined[:, : dims.experts], joined[:, dims.experts :]

    def call() -> None:
        products.multiply_fp32(x, weights.joined, joined)
        pointwise.activate_cast(rest, latent, shared_act)

    return Arm(call, returned(case.dims.rows_stage.outputs, (logits, latent, shared_act)))


def tail_separate(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """The norm, the up GEMM, and the shared expert's GEMM added onto it."""
    weights = _tail(case)
    routed, shared_act = case.inputs["routed"], case.inputs["shared_act"]
    y, out = case.empty(case.dims.latent), case.empty(case.dims.hidden)
    part, up = y[:, weights.columns], weights.up[:, weights.columns]

    def call() -> None:
        pointwise.norm(routed, weights.norm, y)
        products.multiply(part, up, out)
        products.add(shared_act, weights.down, out)

    return Arm(call, {"y": y, "out": out})


def tail_separate_fp32(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """The norm, both products in fp32, and one kernel that adds them and rounds once, as a program does."""
    weights = _tail(case)
    routed, shared_act = case.inputs["routed"], case.inputs["shared_act"]
    y, out = case.empty(case.dims.latent), case.empty(case.dims.hidden)
    routed_product, shared_product = (case.empty(case.dims.hidden, torch.float32) for _ in range(2))
    part, up = y[:, weights.columns], weights.up[:, weights.columns]

    def call() -> None:
        pointwise.norm(routed, weights.norm, y)
        products.multiply_fp32(part, up, routed_product)
        products.multiply_fp32(shared_act, weights.down, shared_product)
        torch.add(routed_product, shared_product, out=out)

    return Arm(call, {"y": y, "out": out})


def tail_joined(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """The norm of this rank's columns, then one GEMM over `[y slice | shared_act]` and `[up slice | down]`.

    shared_act lies in the joined tokens already: a front can write it there, so no copy is charged to the chain.
    """
    weights, out = _tail(case), case.empty(case.dims.hidden)
    width = case.dims.latent_slice(case.row.tp)
    tokens = case.joined_tokens
    if tokens is None:
        tokens = case.empty(weights.joined.shape[1])
        tokens[:, width:] = case.inputs["shared_act"]
    routed, part, joined = case.inputs["routed"], tokens[:, :width], weights.joined

    def call() -> None:
        pointwise.norm_slice(routed, weights.norm, part)
        products.multiply(tokens, joined, out)

    return Arm(call, {"out": out})


def tail_joined_copied(case: Case, pointwise: Pointwise, products: Cublas = CUBLAS) -> Arm:
    """As `tail_joined`, where shared_act lies in a tensor of its own, as a caller has it: the chain copies it too."""
    weights, out = _tail(case), case.empty(case.dims.hidden)
    tokens, joined = case.empty(weights.joined.shape[1]), weights.joined
    routed, shared_act = case.inputs["routed"], case.inputs["shared_act"]

    def call() -> None:
        pointwise.norm_join(routed, weights.norm, shared_act, tokens)
        products.multiply(tokens, joined, out)

    return Arm(call, {"out": out})


def _front(case: Case) -> FrontWeights:
    assert isinstance(case.weights, FrontWeights)
    return case.weights


def _tail(case: Case) -> TailWeights:
    assert isinstance(case.weights, TailWeights)
    return case.weights


RIVALS: Mapping[str, Mapping[str, Builder]] = {
    "front": {
        "separate": front_separate,
        SEPARATE_FP32: front_separate_fp32,
        "joined": front_joined,
        "joined_fp32": front_joined_fp32,
    },
    "tail": {
        "separate": tail_separate,
        SEPARATE_FP32: tail_separate_fp32,
        "joined": tail_joined,
        "joined_copied": tail_joined_copied,
    },
}


def tolerances_of(dims: ModelDims, name: str) -> Mapping[str, float]:
    """What a chain is held to: our own tolerances where it rounds as we do, else wider ones.

    Bits are asked of none: torch adds the squares of a norm in another order.
    """
    wider = rival_tolerances(dims)
    if name != SEPARATE_FP32:
        return wider
    return {result: own or wider[result] for result, own in dims.tolerances.items()}


def gemm_limit(case: Case) -> Arm:
    """cuBLAS on the row's own joined shape: its time is the limit of a row that computes rather than streams.

    front: `[T, hidden] x [experts + latent + 2 * I_LOCAL, hidden]`. tail: `[T, latent / TP + I_LOCAL] x [hidden, …]`.
    Output bf16, no elementwise part.
    """
    weights = case.weights
    if isinstance(weights, FrontWeights):
        tokens = case.inputs["x"]
    else:
        tokens = torch.cat((case.inputs["routed"][0][:, weights.columns], case.inputs["shared_act"]), dim=1)
    joined = weights.joined
    out = case.empty(joined.shape[0])

    def call() -> None:
        torch.mm(tokens, joined.T, out=out)

    return Arm(call, {})
