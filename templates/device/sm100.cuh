#pragma once
// PTX that only the Blackwell kernels use.

#include "${header("device/tcgen05.cuh") | file_name}"
#include "${header("device/tensor_memory.cuh") | file_name}"
#include "${header("device/stmatrix.cuh") | file_name}"
