#pragma once
// PTX that only the Blackwell kernels use. Include the common device preamble first.

/*% include "device/tcgen05.cuh" %*/

/*% include "device/tensor_memory.cuh" %*/

/*% include "device/stmatrix.cuh" %*/
