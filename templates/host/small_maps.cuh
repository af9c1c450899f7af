#pragma once
// Drivers up to CUDA ${small_map.last_major | i32}.${small_map.last_minor | i32} set bit ${small_map.bit | i32} of a tensor map's second 64-bit word wrongly on Blackwell,
// where the map may lie in an allocation below ${small_map.kib | i32} KiB and is not dense (docs/known-faults.md). The Python runtime
// clears the bit; this does it for consumers that encode their maps in C++.

#include <cstdint>

namespace cake_host {

// Whether what a map of `rank` dimensions spans is below the limit and its strides are not those of a dense array.
constexpr bool is_small_and_loose(
    int rank, const uint64_t* dims, const uint64_t* strides_bytes, uint64_t element_bytes) {
    uint64_t packed = dims[0] * element_bytes;
    uint64_t span = packed;
    bool dense = true;
    for (int i = 0; i + 1 < rank; ++i) {
        dense = dense && strides_bytes[i] == packed;
        packed *= dims[i + 1];
        span += (dims[i + 1] - 1) * strides_bytes[i];
    }
    return span < ${small_map.kib | i32} * 1024 && !dense;
}

// `driver_version` as cuDriverGetVersion gives it: 1000 * major + 10 * minor.
constexpr bool driver_has_the_fault(int driver_version, int compute_capability_major) {
    return driver_version < ${small_map.fixed_version | i32} && compute_capability_major == ${small_map.compute_major | i32};
}

// The second word of a map, without the bit.
constexpr uint64_t without_the_faulty_bit(uint64_t word) {
    return word & ~(uint64_t{1} << ${small_map.bit | i32});
}

}  // namespace cake_host
