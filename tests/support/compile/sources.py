"""Small CUDA texts that the compile tests share, each with the property its name states."""

from __future__ import annotations

from dataclasses import replace

from cakegen.compile import CompileRequest

HEADER = "#pragma once\n__device__ __forceinline__ float scaled(float v) { return v * SCALE; }\n"

PLAIN = """
#include "scaled.cuh"
extern "C" __global__ void __launch_bounds__(128) kernel_plain(float* out, int count) {
  __shared__ float staged[128];
  staged[threadIdx.x] = scaled(out[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x < count) out[threadIdx.x] = staged[threadIdx.x ^ 1];
}
"""

SPILLING = """
extern "C" __global__ void __maxnreg__(32) kernel_plain(float* out, int pitch) {
  float held[128];
#pragma unroll
  for (int i = 0; i < 128; i++) held[i] = out[i * pitch];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; i++) out[i * pitch + threadIdx.x] = held[i] * held[(i * 7) % 128];
}
"""

INDEXED = """
extern "C" __global__ void kernel_plain(int* out, int count) {
  int held[32];
  for (int i = 0; i < count; i++) held[out[i] & 31] = i;
  out[0] = held[count & 31];
}
"""

SETMAXNREG_IGNORED = """
extern "C" __global__ void kernel_plain(float* out) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  out[threadIdx.x] = 1.0f;
}
"""

WGMMA_SERIALIZED = """
__device__ __noinline__ float doubled(float v) { return v * 2.0f; }
extern "C" __global__ void __launch_bounds__(128) kernel_plain(float* out, unsigned long long descriptor) {
  float a = out[0], b = out[1], c = out[2], d = out[3];
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; i++) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                 : "+f"(a), "+f"(b), "+f"(c), "+f"(d) : "l"(descriptor));
    a = doubled(a);
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  out[0] = a; out[1] = b; out[2] = c; out[3] = d;
}
"""

PLAIN_REQUEST = CompileRequest(
    name="plain",
    arch="sm_90a",
    source=PLAIN,
    headers=(("scaled.cuh", HEADER),),
    flags=("-std=c++17",),
    constants=(("SCALE", 3),),
    kernel_symbol="kernel_plain",
)


def request_of(source: str, **changes: object) -> CompileRequest:
    """The plain request with another source, and any other field changed."""
    return replace(PLAIN_REQUEST, source=source, **changes)
