// `tests/emulator/kernels/gemm_pair.cu` with what it includes, as one file that NVRTC takes.
#include "cake_device_common.cuh"
#include "tcgen05.cuh"
using namespace cake;
#include "gemm_pair.cuh"
#include "gemm_pair.cu"
