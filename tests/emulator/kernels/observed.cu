// CTA 0 publishes; CTA 1 polls, and resets the counter by a plain store behind the read that found it (PTX ISA 8.9.5).
extern "C" __global__ void obs(unsigned* counter, float* data, float* out) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    data[0] = 1.0f;
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    atomicAdd(counter, 1u);
  } else {
    unsigned v;
    do { asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory"); } while (v == 0);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    out[0] = data[0];
    *counter = 0;
  }
}
// Gives up after 64 polls.
extern "C" __global__ void patience(unsigned* counter, float* out) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    unsigned v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    #pragma unroll 1
    for (int i = 0; i < 64 && v == 0; i++) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    out[0] = v ? 1.0f : 2.0f;
  }
}
