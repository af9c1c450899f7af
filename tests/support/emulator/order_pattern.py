"""A pattern of synchronisation as a kernel, and the ways to break it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """A kernel `kernel_test(out, data, counter, record, map)`, and texts whose replacement breaks it.

    Parameters
    ----------
    broken
        (text, replacement, kinds of fault that may be reported, words of the report).
    """

    source: str
    broken: tuple[tuple[str, str, set[str], str], ...]
    grid: int = 1
    block: int = 64
    cluster: int = 1
    cooperative: bool = False


WRAPPERS = """
#define ASM(...) asm volatile(__VA_ARGS__)
#define LANE0 (lane_id() == 0)
#define STARTED \
    ASM("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory")
__device__ u32 load_relaxed(const u32* at) {
    u32 value;
    ASM("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ void wait_relaxed(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        ASM("{ .reg .pred p; mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}
"""


def kernel(body: str, cluster: int = 1) -> str:
    shape = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    return f"""{WRAPPERS}
    extern "C" __global__ void {shape}kernel_test(
        u32* out, u32* data, u32* counter, u64* record, const __grid_constant__ TensorMap map) {{
        const u32 smem = smem_base(), t = threadIdx.x, warp = warp_index(), rank = cluster_ctarank();
        const u32 tile = smem + 1024;
        const Watch watch{{record, 1}};
        (void)tile; (void)rank; (void)warp;
        {body}
    }}"""


INIT_ONE = "if (t == 0) { mbarrier_init(smem, 1); fence_mbarrier_init(); } __syncthreads();"
INIT_PAIR = """if (t == 0) {{ mbarrier_init(smem, {0}); mbarrier_init(smem + 8, 1); fence_mbarrier_init(); }}
    __syncthreads(); cluster_arrive(); cluster_wait();"""
LEAVE = "cluster_arrive(); cluster_wait();"
