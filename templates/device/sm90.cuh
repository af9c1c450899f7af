#pragma once
// PTX that only the Hopper kernels use, but for the multiplication: a header a width (wgmma_mma).

#include "${header("device/wgmma.cuh") | file_name}"
#include "${header("device/stmatrix.cuh") | file_name}"
