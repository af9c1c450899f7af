#pragma once
// Every PTX instruction that kernels of all architectures use, one function an instruction. Needs no toolkit header.

/*% include "device/base.cuh" %*/

/*% include "device/memory.cuh" %*/

/*% include "device/mbarrier.cuh" %*/

/*% include "device/tma.cuh" %*/

/*% include "device/cluster.cuh" %*/

/*% include "device/grid.cuh" %*/

/*% include "device/math.cuh" %*/
