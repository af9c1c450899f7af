// TVM-FFI entry `run`: the arguments in the order of the registry's arg_plan. It checks what it can see, encodes the
// tensor maps and launches on the environment's stream. `wait_record` is at least 16 zeroed int64 words that the GPU
// can reach, word 0 the limit of a wait in ns; `counters` holds the launch's control words, int32, which start at zero.

#include "host/entry.cuh"

#include "${(spec.name ~ "_kernel.cu") | file_name}"

namespace {

struct Binding {
//# A line has at most 120 columns, whatever an export's name is.
//% if spec.name | length > 76
    static constexpr const char* kName =
        "${spec.name | ident}";
//% else
    static constexpr const char* kName = "${spec.name | ident}";
//% endif
    static constexpr cake_host::Argument kArguments[] = {
//# By pointer: bf16 elements are raw bits.
//% set dtypes = {"u16*": ["kDLBfloat", 16], "float*": ["kDLFloat", 32], "u32*": ["kDLInt", 32], "u64*": ["kDLInt", 64]}
//% for kind, name in spec.arg_plan
//% if kind == "tma_buffer"
//% set map = spec.tensor_maps | selectattr("name", "equalto", name) | first
//% set view = [map.view == "chunks", map.box[0], map.box[1], map.box[2]] | map("literal") | join(", ")
        cake_host::${("token_tiles" if map.token_parts else "tiles") | ident}(${name | string}, {${view | code}}),
//% elif kind == "buffer"
//% set dtype = dtypes[spec.buffer_type(name).removeprefix("const ")]
        cake_host::buffer(${name | string}, ${dtype[0] | ident}, ${dtype[1] | i32}),
//% else
        cake_host::${kind | ident}(${name | string}),
//% endif
//% endfor
    };
//% if spec.role in ("tail_norm", "tail_sum")
    static constexpr cake_host::Shape kShape = cake_host::row_grid(Cfg::kRowsPerCta);
//% elif spec.role in ("front_gemm", "tail_gemm")
    static constexpr cake_host::Shape kShape = cake_host::${gemm_grid | ident}(Cfg::kBlockM);
//% else
//% set parts = spec.tensor_maps | map(attribute="token_parts") | max
//% set parts = "Cfg::kTokenParts" if parts > 1 else "1"
    static constexpr cake_host::Shape kShape = cake_host::fixed_grid(GRID_CTAS, Cfg::kNPad, ${parts | code});
//% endif
//% set launch = spec.launch
//% set extents = [launch.block[0], launch.cluster[0]]
//% set facts = extents + [launch.cooperative, launch.programmatic, launch.dynamic_smem_bytes]
    static constexpr cake_host::Attributes kLaunch{${facts | map("literal") | join(", ") | code}};
//% if spec.name | length > 74
    static constexpr auto* kKernel =
        &kernel_${spec.name | ident};
//% else
    static constexpr auto* kKernel = &kernel_${spec.name | ident};
//% endif
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, cake_host::Entry<Binding>::run);
