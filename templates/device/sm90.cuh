#pragma once
// PTX that only the Hopper kernels use. Include the common device preamble first.

/*% include "device/wgmma.cuh" %*/

/*% include "device/stmatrix.cuh" %*/
