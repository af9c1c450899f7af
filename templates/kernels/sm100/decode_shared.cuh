/*% include "kernels/pair.cuh" %*/

/*% include "kernels/sm100/accumulators.cuh" %*/
