#pragma once
// The host half of every program: what its binding's table says of arguments and launch, checked and launched.

#include "host/common.cuh"

#include <cstddef>
#include <cstring>
#include <utility>

namespace cake_host {

// `tiles`: a matrix that a tensor map tiles. `tokens`: one whose rows are tokens, and whose box is only as high as they
// are many. `buffer`: a tensor by its address. `grid`: an extent of the launch, which the kernel is not given.
enum class Kind { tiles, tokens, buffer, parameter, grid };

// One argument of the entry.
struct Argument {
    Kind kind;
    const char* name;
    int dtype_code = 0;  // of a tensor
    int dtype_bits = 0;
    View view{};  // of what a tensor map tiles
};

constexpr Argument tiles(const char* name, const View& view) {
    return {Kind::tiles, name, kDLBfloat, 16, view};
}

constexpr Argument token_tiles(const char* name, const View& view) {
    return {Kind::tokens, name, kDLBfloat, 16, view};
}

constexpr Argument buffer(const char* name, int dtype_code, int dtype_bits) {
    return {Kind::buffer, name, dtype_code, dtype_bits};
}

constexpr Argument parameter(const char* name) {
    return {Kind::parameter, name};
}

constexpr Argument grid(const char* name) {
    return {Kind::grid, name};
}

// What a launch must be. `fixed`: a grid of `ctas`, and at most `tokens` tokens a CTA in each of `token_parts` parts.
// `pairs`: a pair of CTAs an item, and an even number of row tiles. `persistent`: some pairs, and the row tiles that
// there are. `rows`: a grid that covers all rows. `rows` counts those of a tile, or of a CTA.
struct Shape {
    enum class Form { fixed, pairs, persistent, rows } form;
    int64_t ctas = 0;
    int64_t tokens = 0;
    int64_t token_parts = 1;
    int64_t rows = 0;
};

constexpr Shape fixed_grid(int64_t ctas, int64_t tokens, int64_t token_parts) {
    return {Shape::Form::fixed, ctas, tokens, token_parts};
}

constexpr Shape pair_grid(int64_t rows) {
    return {Shape::Form::pairs, 0, 0, 1, rows};
}

constexpr Shape persistent_grid(int64_t rows) {
    return {Shape::Form::persistent, 0, 0, 1, rows};
}

constexpr Shape row_grid(int64_t rows) {
    return {Shape::Form::rows, 0, 0, 1, rows};
}

// What an argument was given: a tensor or a number.
struct Value {
    Value(const TensorView& view) : tensor(&view) {}
    Value(int64_t given) : number(given) {}
    const TensorView* tensor = nullptr;
    int64_t number = 0;
};

// A call of one program: the table's rows with what they were given.
struct Call {
    const char* program;
    const Argument* arguments;
    const Value* values;
    std::size_t count;

    int64_t number(const char* name) const {
        std::size_t i = 0;
        while (i < count && (values[i].tensor != nullptr || std::strcmp(arguments[i].name, name) != 0)) ++i;
        TVM_FFI_CHECK(i < count, InternalError) << program << ": its table has no number " << name;
        return values[i].number;
    }

    dim3 grid() const {
        return dim3(
            checked_i32(number("grid_x"), program, "grid_x"), checked_i32(number("grid_y"), program, "grid_y"),
            checked_i32(number("grid_z"), program, "grid_z"));
    }
};

inline void check_fixed(const Call& call, const Shape& shape) {
    const int64_t x = call.number("grid_x"), y = call.number("grid_y"), z = call.number("grid_z");
    TVM_FFI_CHECK(x == shape.ctas && y == 1 && z == 1, ValueError)
        << call.program << ": needs a grid of (" << shape.ctas << ", 1, 1) CTAs; got (" << x << ", " << y << ", " << z
        << ")";
    const int64_t tokens = call.number("num_tokens"), most = shape.token_parts * shape.tokens;
    TVM_FFI_CHECK(tokens >= 1 && tokens <= most, ValueError)
        << call.program << ": takes 1 to " << most << " tokens; got " << tokens;
}

inline void check_pairs(const Call& call, const Shape& shape) {
    const int64_t x = call.number("grid_x"), y = call.number("grid_y"), z = call.number("grid_z");
    const int64_t items = call.number("num_items"), m_tiles = call.number("m_tiles");
    const int64_t tokens = call.number("num_tokens");
    TVM_FFI_CHECK(x == 2 * items && y == 1 && z == 1, ValueError)
        << call.program << ": needs a grid of (" << 2 * items << ", 1, 1) CTAs, a pair an item; got (" << x << ", " << y
        << ", " << z << ")";
    TVM_FFI_CHECK(m_tiles % 2 == 0 && m_tiles * shape.rows >= tokens, ValueError)
        << call.program << ": " << m_tiles << " row tiles of " << shape.rows << " do not cover " << tokens << " tokens";
}

inline void check_persistent(const Call& call, const Shape& shape) {
    const int64_t x = call.number("grid_x"), y = call.number("grid_y"), z = call.number("grid_z");
    const int64_t items = call.number("num_items"), m_tiles = call.number("m_tiles");
    const int64_t tokens = call.number("num_tokens"), row_tiles = (tokens + shape.rows - 1) / shape.rows;
    TVM_FFI_CHECK(x >= 2 && x <= 2 * items && y == 1 && z == 1, ValueError)
        << call.program << ": needs a grid of (2 to " << 2 * items << ", 1, 1) CTAs; got (" << x << ", " << y << ", "
        << z << ")";
    TVM_FFI_CHECK(m_tiles == row_tiles, ValueError)
        << call.program << ": " << tokens << " tokens are " << row_tiles << " row tiles of " << shape.rows << "; got "
        << m_tiles;
}

inline void check_rows(const Call& call, const Shape& shape) {
    const int64_t x = call.number("grid_x"), y = call.number("grid_y"), z = call.number("grid_z");
    const int64_t tokens = call.number("num_tokens");
    TVM_FFI_CHECK(x * shape.rows >= tokens && y == 1 && z == 1, ValueError)
        << call.program << ": a grid of (" << x << ", " << y << ", " << z << ") CTAs does not cover " << tokens
        << " rows, " << shape.rows << " a CTA";
}

inline void check_shape(const Call& call, const Shape& shape) {
    switch (shape.form) {
        case Shape::Form::fixed: return check_fixed(call, shape);
        case Shape::Form::pairs: return check_pairs(call, shape);
        case Shape::Form::persistent: return check_persistent(call, shape);
        case Shape::Form::rows: return check_rows(call, shape);
    }
}

// The box of a map. A box of tokens is as high as the part of one CTA, the larger where they differ, and of one chunk
// where it is lower than the kernel's.
inline View view_of(const Call& call, const Argument& argument, const Shape& shape) {
    View view = argument.view;
    if (argument.kind == Kind::tokens) {
        const int64_t part = (call.number("num_tokens") + shape.token_parts - 1) / shape.token_parts;
        if (part != shape.tokens) view.box_chunks = 1;
        view.box_rows = static_cast<uint32_t>(part);
    }
    return view;
}

// What the kernel gets of one argument; it reads whichever its parameter is.
struct Passed {
    CUtensorMap map;
    void* address;
    int32_t number;
};

// Maps come before addresses and numbers, so that what is wrong with a matrix is said first.
template <std::size_t kCount>
void run_program(const Call& call, const Shape& shape, const Attributes& attributes, const void* kernel) {
    const int device = call.values[0].tensor->device().device_id;
    const DeviceGuard guard(device, call.program);
    const dim3 grid_ctas = call.grid();
    check_shape(call, shape);
    Passed passed[kCount];
    void* pointers[kCount];
    for (std::size_t i = 0; i < kCount; ++i) {
        const Argument& argument = call.arguments[i];
        if (argument.kind != Kind::tiles && argument.kind != Kind::tokens) continue;
        const Expected expected{call.program, argument.name, argument.dtype_code, argument.dtype_bits};
        passed[i].map = encode_map(*call.values[i].tensor, device, view_of(call, argument, shape), expected);
    }
    std::size_t count = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
        const Argument& argument = call.arguments[i];
        if (argument.kind == Kind::grid) continue;
        if (argument.kind == Kind::buffer) {
            const Expected expected{call.program, argument.name, argument.dtype_code, argument.dtype_bits};
            passed[i].address = address_of(*call.values[i].tensor, device, expected);
            pointers[count++] = &passed[i].address;
        } else if (argument.kind == Kind::parameter) {
            passed[i].number = checked_i32(call.values[i].number, call.program, argument.name);
            pointers[count++] = &passed[i].number;
        } else {
            pointers[count++] = &passed[i].map;
        }
    }
    launch(kernel, attributes, grid_ctas, device, pointers, call.program);
}

template <Kind kKind>
using Given = std::conditional_t<kKind == Kind::parameter || kKind == Kind::grid, int64_t, TensorView>;

template <class Binding>
constexpr std::size_t kArgumentCount = sizeof(Binding::kArguments) / sizeof(Argument);

// The entry of a binding, a function of its arguments: `Entry<Binding>::run`.
template <class Binding, class Places = std::make_index_sequence<kArgumentCount<Binding>>>
struct Entry;

template <class Binding, std::size_t... kPlace>
struct Entry<Binding, std::index_sequence<kPlace...>> {
    static void run(Given<Binding::kArguments[kPlace].kind>... given) {
        const Value values[] = {Value(given)...};
        const Call call{Binding::kName, Binding::kArguments, values, sizeof...(kPlace)};
        const void* kernel = reinterpret_cast<const void*>(Binding::kKernel);
        run_program<sizeof...(kPlace)>(call, Binding::kShape, Binding::kLaunch, kernel);
    }
};

}  // namespace cake_host
