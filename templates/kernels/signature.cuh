//# A kernel's launch bounds, name and parameters, to the brace that opens its body. A CTA with dynamic shared memory is
//# alone on its multiprocessor.
extern "C" __global__ void
//% if spec.launch.cluster[0] > 1
__cluster_dims__(${spec.launch.cluster[0] | i32}, 1, 1)
//% endif
//% if spec.launch.dynamic_smem_bytes
__launch_bounds__(Cfg::kNumThreads, 1)
//% else
__launch_bounds__(Cfg::kNumThreads)
//% endif
kernel_${spec.name | ident}(
//% for type, name in spec.parameters
    ${type | type_name} ${name | ident}${(") {" if loop.last else ",") | code}
//% endfor
