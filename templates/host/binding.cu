//% set token_maps = spec.tensor_maps | selectattr("token_parts") | list
//% set parts = token_maps[0].token_parts if token_maps else 1
// TVM-FFI entry `run`: the arguments in the order of the registry's arg_plan. It checks what it can see, encodes the
// tensor maps and launches on the environment's stream. `wait_record` is at least 16 zeroed int64 words that the GPU
// can reach, word 0 the limit of a wait in ns; `counters` holds the launch's control words, int32, which start at zero.

#include "${host_common | file_name}"

#include "${(spec.name ~ "_kernel.cu") | file_name}"

namespace {

using cake_host::Expected;
using cake_host::TensorView;

constexpr const char* kProgram = "${spec.name | ident}";

//# By pointer: bf16 elements are raw bits.
//% set dtypes = {"u16*": ["kDLBfloat", 16], "float*": ["kDLFloat", 32], "u32*": ["kDLInt", 32], "u64*": ["kDLInt", 64]}
void run(
//% for kind, name in spec.arg_plan
//% set last = loop.last
//% if kind == "tma_buffer"
    TensorView ${(name ~ "_tiles") | ident}${(")" if last else ",") | code}
//% elif kind == "buffer"
    TensorView ${name | ident}${(")" if last else ",") | code}
//% else
    int64_t ${name | ident}${(") {" if last else ",") | code}
//% endif
//% endfor
//% set first = spec.arg_plan[0]
    const int device = ${(first[1] ~ ("_tiles" if first[0] == "tma_buffer" else "")) | ident}.device().device_id;
    const cake_host::DeviceGuard guard(device, kProgram);
    const dim3 grid_ctas(
        cake_host::checked_i32(grid_x, kProgram, "grid_x"),
        cake_host::checked_i32(grid_y, kProgram, "grid_y"),
        cake_host::checked_i32(grid_z, kProgram, "grid_z"));
//% if spec.role == "tail_norm"
    TVM_FFI_CHECK(grid_x * Cfg::kRowsPerCta >= num_tokens && grid_y == 1 && grid_z == 1, ValueError)
        << kProgram << ": a grid of (" << grid_x << ", " << grid_y << ", " << grid_z << ") CTAs does not cover "
        << num_tokens << " rows, " << Cfg::kRowsPerCta << " a CTA";
//% elif spec.role in ("front_gemm", "tail_gemm")
//% if spec.arch_family == "sm100"
    TVM_FFI_CHECK(grid_x == 2 * num_items && grid_y == 1 && grid_z == 1, ValueError)
        << kProgram << ": needs a grid of (" << 2 * num_items << ", 1, 1) CTAs, a pair an item; got (" << grid_x << ", "
        << grid_y << ", " << grid_z << ")";
//% else
    TVM_FFI_CHECK(grid_x >= 2 && grid_x <= 2 * num_items && grid_y == 1 && grid_z == 1, ValueError)
        << kProgram << ": needs a grid of (2 to " << 2 * num_items << ", 1, 1) CTAs; got (" << grid_x << ", " << grid_y
        << ", " << grid_z << ")";
//% endif
//% if spec.arch_family == "sm100"
    TVM_FFI_CHECK(m_tiles % 2 == 0 && m_tiles * Cfg::kBlockM >= num_tokens, ValueError)
        << kProgram << ": " << m_tiles << " row tiles of " << Cfg::kBlockM << " do not cover " << num_tokens
        << " tokens";
//% else
    const int64_t row_tiles = (num_tokens + Cfg::kBlockM - 1) / Cfg::kBlockM;
    TVM_FFI_CHECK(m_tiles == row_tiles, ValueError)
        << kProgram << ": " << num_tokens << " tokens are " << row_tiles << " row tiles of " << Cfg::kBlockM << "; got "
        << m_tiles;
//% endif
//% else
    TVM_FFI_CHECK(grid_x == Cfg::kGridCtas && grid_y == 1 && grid_z == 1, ValueError)
        << kProgram << ": needs a grid of (" << Cfg::kGridCtas << ", 1, 1) CTAs; got (" << grid_x << ", " << grid_y
        << ", " << grid_z << ")";
//% if parts > 1
    constexpr int kMostTokens = Cfg::kTokenParts * Cfg::kNPad;
    TVM_FFI_CHECK(num_tokens >= 1 && num_tokens <= kMostTokens, ValueError)
        << kProgram << ": takes 1 to " << kMostTokens << " tokens; got " << num_tokens;
//% else
    TVM_FFI_CHECK(num_tokens >= 1 && num_tokens <= Cfg::kNPad, ValueError)
        << kProgram << ": takes 1 to " << Cfg::kNPad << " tokens; got " << num_tokens;
//% endif
//% endif
//% if token_maps and parts > 1
    // A box of tokens is as high as the part of one CTA, the larger where they differ.
    const uint32_t box_tokens = static_cast<uint32_t>((num_tokens + Cfg::kTokenParts - 1) / Cfg::kTokenParts);
    const bool whole_boxes = box_tokens == Cfg::kNPad;
//% elif token_maps
    // A box of tokens is as high as there are tokens, and of one chunk where they are fewer than the kernel's.
    const uint32_t box_tokens = static_cast<uint32_t>(num_tokens);
    const bool whole_boxes = num_tokens == Cfg::kNPad;
//% endif
//% for map in spec.tensor_maps
    CUtensorMap ${(map.name ~ "_map") | ident} = cake_host::encode_map(
        ${(map.operand ~ "_tiles") | ident}, device,
//% if map.token_parts
        {${(map.view == "chunks") | boolean}, ${map.box[0] | i32}, box_tokens, whole_boxes ? ${map.box[2] | i32}u : 1u},
//% else
        {${(map.view == "chunks") | boolean}, ${map.box[0] | i32}, ${map.box[1] | i32}, ${map.box[2] | i32}},
//% endif
        Expected{kProgram, ${map.operand | string}, kDLBfloat, 16});
//% endfor
//% for kind, name in spec.arg_plan
//% if kind == "buffer"
//% set pointer = spec.buffer_type(name).removeprefix("const ")
//% set dtype = dtypes[pointer]
    auto* ${(name ~ "_address") | ident} = static_cast<${pointer | type_name}>(cake_host::address_of(
        ${name | ident}, device, Expected{kProgram, ${name | string}, ${dtype[0] | ident}, ${dtype[1] | i32}}));
//% elif kind == "parameter"
    i32 ${(name ~ "_i32") | ident} = cake_host::checked_i32(${name | ident}, kProgram, ${name | string});
//% endif
//% endfor
    void* arguments[] = {
//% for kind, name in spec.arg_plan
//% if kind == "tma_buffer"
        &${(name ~ "_map") | ident},
//% elif kind == "buffer"
        &${(name ~ "_address") | ident},
//% elif kind == "parameter"
        &${(name ~ "_i32") | ident},
//% endif
//% endfor
    };
    const cake_host::Attributes attributes{
        ${spec.launch.block[0] | i32}, ${spec.launch.cluster[0] | i32}, ${spec.launch.cooperative | boolean},
        ${spec.launch.programmatic | boolean}, ${spec.launch.dynamic_smem_bytes | i32}};
    const void* kernel = reinterpret_cast<const void*>(&kernel_${spec.name | ident});
    cake_host::launch(kernel, attributes, grid_ctas, device, arguments, kProgram);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
