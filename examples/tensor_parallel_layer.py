"""One layer under tensor parallelism: front, experts, tail, all-reduce; compared with the same layer on one rank.

On GPUs (one process a GPU, NCCL):

    torchrun --nproc-per-node 8 examples/tensor_parallel_layer.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/tensor_parallel_layer.py

On CPUs (gloo), with torch in the place of the programs, or with `--emulate` the programs themselves, which take seconds
for the small model:

    torchrun --nproc-per-node 2 examples/tensor_parallel_layer.py --device cpu --export tiny_latent_moe --emulate

TP is the number of processes. The experts are the identity; in a model they are routed by the logits, and what reaches
the tail is their sum over all ranks (or its partials), since the norm is of the whole sum.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from cakegen.model import ModelDims
from cakegen.runtime import LatentMoe, shared_latent_moe
from cakegen.runtime.operators import define_operators
from cakegen.runtime.projections import LatentMoeProjections

TOLERANCE = 2e-2
"""Absolute and relative: twice that of one bf16 output, since every rank rounds its part and the sum rounds again."""


def random_checkpoint(dims: ModelDims, device: torch.device) -> dict[str, torch.Tensor]:
    """Whole tensors by their checkpoint names, the same on every rank; products come out at order 1."""
    make = torch.Generator(device).manual_seed(0)

    def weight(rows: int, cols: int) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=make, device=device) * cols**-0.5).bfloat16()

    return {
        "gate.weight": weight(dims.experts, dims.hidden),
        "routed_expert_down_proj.weight": weight(dims.latent, dims.hidden),
        "routed_expert_norm.weight": torch.ones(dims.latent, dtype=torch.bfloat16, device=device),
        "routed_expert_up_proj.weight": weight(dims.hidden, dims.latent),
        "shared_experts.gate_proj.weight": weight(dims.shared_intermediate, dims.hidden),
        "shared_experts.up_proj.weight": weight(dims.shared_intermediate, dims.hidden),
        "shared_experts.down_proj.weight": weight(dims.hidden, dims.shared_intermediate),
    }


def identity_experts(logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """What the experts of a real model would compute: one partial, `[1, T, latent]`."""
    return latent.unsqueeze(0)


def run_layer(moe: LatentMoe, weights: dict[str, torch.Tensor], x: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """The layer's output `[T, hidden]`, summed over the ranks of the default process group where `tp` > 1."""
    layer = LatentMoeProjections(tp=tp, rank=rank, moe=moe, device=x.device)
    layer.load_weights(weights.items())
    if x.device.type == "cuda":
        moe.warm_up(x.device, tp, tokens=(x.shape[0],))
    out = layer(x, identity_experts)
    if tp > 1:
        dist.all_reduce(out)
    return out


def main() -> None:
    """Run the layer on all ranks and on one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", default="kimi_k3_latent_moe")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--emulate", action="store_true", help="on CPUs: the programs' PTX instead of torch")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=2))
    try:
        rank, tp = dist.get_rank(), dist.get_world_size()
        moe = shared_latent_moe(options.export)
        if options.emulate:
            define_operators(moe, cpu_backend="emulator")
        weights = random_checkpoint(moe.model.dims, device)
        make = torch.Generator(device).manual_seed(1)
        x = torch.randn(options.tokens, moe.model.dims.hidden, generator=make, device=device).bfloat16()
        with torch.inference_mode():
            out = run_layer(moe, weights, x, tp, rank)
            alone = run_layer(moe, weights, x, 1, 0)
        torch.testing.assert_close(out, alone, atol=TOLERANCE, rtol=TOLERANCE)
        largest = (out.double() - alone.double()).abs().max().item()
        if rank == 0:
            where = f"{device.type}, emulated" if options.emulate else device.type
            print(f"TP {tp}, T = {options.tokens}, {where}: equals TP 1; largest difference {largest:.4f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
