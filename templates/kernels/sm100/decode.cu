#include "${device_common | file_name}"
#include "${device_family | file_name}"

using namespace cake;

//% if spec.role == "decode_front"
/*% include "kernels/sm100/decode_front.cu" %*/
//% else
/*% include "kernels/sm100/decode_tail.cu" %*/
//% endif
