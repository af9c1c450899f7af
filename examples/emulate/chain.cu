// Two launches of one stream; the second is programmatic: it may start before the first has completed.

__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

extern "C" __global__ void produce(const unsigned* seeds, unsigned* squares) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    griddepcontrol_launch_dependents();
    squares[i] = seeds[i] * seeds[i];
}

// Reverses the squares of each block; the loads of `seeds`, which nobody writes, need no wait.
extern "C" __global__ void consume(const unsigned* seeds, const unsigned* squares, unsigned* sums) {
    __shared__ unsigned staged[64];
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    staged[threadIdx.x] = seeds[i];
    __syncthreads();
    griddepcontrol_wait();
    sums[i] = squares[i] + staged[63 - threadIdx.x];
}

// The fault: nothing orders this read of `squares` behind its writes.
extern "C" __global__ void consume_at_once(const unsigned* seeds, const unsigned* squares, unsigned* sums) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    sums[i] = squares[i] + seeds[i];
}
