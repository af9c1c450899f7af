// PTX that only Blackwell's GEMMs use. The common and the family's preamble come first.

/*% include "device/tcgen05_pair.cuh" %*/

/*% include "device/tma_pair.cuh" %*/

/*% include "device/launch_control.cuh" %*/

/*% include "device/wide_store.cuh" %*/

/*% include "device/tma_store.cuh" %*/
