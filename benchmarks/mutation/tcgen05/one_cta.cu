// `tests/emulator/kernels/gemm_one_cta.cu` with what it includes, as one file that NVRTC takes.
#include "cake_device_base.cuh"
#include "cake_device_cluster.cuh"
#include "cake_device_grid.cuh"
#include "cake_device_math.cuh"
#include "cake_device_mbarrier.cuh"
#include "cake_device_memory.cuh"
#include "cake_device_tma.cuh"
#include "tcgen05.cuh"
using namespace cake;
#include "gemm_one_cta.cu"
