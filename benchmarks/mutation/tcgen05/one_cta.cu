// `tests/emulator/kernels/gemm_one_cta.cu` with what it includes, as one file that NVRTC takes.
#include "cake_device_common.cuh"
#include "tcgen05.cuh"
using namespace cake;
#include "gemm_one_cta.cu"
