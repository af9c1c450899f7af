//% for header in headers
#include "${header | file_name}"
//% endfor

using namespace cake;

//% for line in about
// ${line | comment}
//% endfor
//
//% for line in spec.pipeline.diagram
//% if line
//   ${line | comment}
//% else
//
//% endif
//% endfor

// Every decision of the planner, and what follows from it. Sizes are bytes where a name ends in Bytes or Offset.
struct Cfg {
//% if spec.waits
    static constexpr u32 kProgramId = ${spec.program_id | hex32};  // how this program names itself in a wait record
//% endif
//% if spec.activation
    using Activation = ${spec.activation | ident};  // what becomes of a gate sum and its up sum
//% endif
//% for constant in spec.constants
//% set type, name, value = constant.value | cpp_type, constant.name | ident, constant.value | literal
    static constexpr ${type} ${name} = ${value};  // ${constant.comment | comment}
//% endfor
//% if spec.pipeline.barriers
    // Barriers from the start of shared memory on: how many of a kind, and the arrivals that complete a phase of each.
    static constexpr BarrierKind kBarriers[] = {
//% for barrier in spec.pipeline.barriers
        {${barrier.count | i32}, ${barrier.arrivals | i32}},  // ${barrier.name | comment}
//% endfor
    };
//% endif
};

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
    ${spec.body | ident}<Cfg>(
//% for operand in spec.operands
//% set end = (");" if loop.last else ",") | code
//% if operand.struct and operand.parameters
        ${operand.struct | ident}{
            ${operand.parameters | names(12)}}${end}
//% elif operand.struct
        ${operand.struct | ident}{}${end}
//% else
        ${operand.parameters[0] | ident}${end}
//% endif
//% endfor
}
