#pragma once
// The host half's shared parts: checks, tensor maps and launches, for C++ and TVM-FFI consumers. The Python runtime
// does the same from the registry and does not need this file.

#include "host/small_maps.cuh"

#include <cuda.h>  // nvcc includes the runtime API by itself

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace cake_host {

using tvm::ffi::TensorView;

inline void check(cudaError_t status, const char* what, const char* program) {
    TVM_FFI_CHECK(status == cudaSuccess, RuntimeError)
        << program << ": " << what << " failed: " << cudaGetErrorName(status) << ": " << cudaGetErrorString(status);
}

// What an argument must be, and how an error names it.
struct Expected {
    const char* program;
    const char* name;
    int dtype_code;
    int dtype_bits;
};

// Makes the tensor's device current for the life of the guard.
class DeviceGuard {
  public:
    DeviceGuard(int device, const char* program) : program_(program) {
        check(cudaGetDevice(&before_), "cudaGetDevice", program);
        check(cudaSetDevice(device), "cudaSetDevice", program);
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    const char* program_;
    int before_ = 0;
};

// Checks device, dtype, inner stride and alignment; returns the address of the first element.
inline void* address_of(const TensorView& tensor, int device, const Expected& expected) {
    const std::string where = std::string(expected.program) + ": " + expected.name;
    TVM_FFI_CHECK(tensor.device().device_type == kDLCUDA || tensor.device().device_type == kDLCUDAHost, ValueError)
        << where << " must be reachable from the GPU; got device type " << tensor.device().device_type;
    TVM_FFI_CHECK(tensor.device().device_type == kDLCUDAHost || tensor.device().device_id == device, ValueError)
        << where << " is on device " << tensor.device().device_id << "; the first tensor is on device " << device;
    TVM_FFI_CHECK(
        tensor.dtype().code == expected.dtype_code && tensor.dtype().bits == expected.dtype_bits &&
            tensor.dtype().lanes == 1,
        TypeError)
        << where << " has dtype code " << static_cast<int>(tensor.dtype().code) << " with "
        << static_cast<int>(tensor.dtype().bits) << " bits; needs code " << expected.dtype_code << " with "
        << expected.dtype_bits;
    TVM_FFI_CHECK(tensor.ndim() > 0 && tensor.stride(tensor.ndim() - 1) == 1, ValueError)
        << where << " must have elements side by side in its last dimension";
    void* address = static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
    TVM_FFI_CHECK(reinterpret_cast<uintptr_t>(address) % 16 == 0, ValueError) << where << " must be 16-byte aligned";
    return address;
}

inline int32_t checked_i32(int64_t value, const char* program, const char* name) {
    TVM_FFI_CHECK(value >= 0 && value <= std::numeric_limits<int32_t>::max(), ValueError)
        << program << ": " << name << " is " << value << "; needs a value in [0, 2^31)";
    return static_cast<int32_t>(value);
}

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder(const char* program) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)", program);
    TVM_FFI_CHECK(found == cudaDriverEntryPointSuccess, RuntimeError)
        << program << ": the driver has no cuTensorMapEncodeTiled; it needs CUDA 12.0 or later";
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

inline bool has_the_fault_of_small_maps(int device, const char* program) {
    int version = 0;
    int major = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion", program);
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute", program);
    return driver_has_the_fault(version, major);
}

// A row-major [rows, cols] bf16 matrix with a row pitch, as a rank-3 map with the 128-byte swizzle and zeros out of
// bounds. chunks: dims (64, rows, cols / 64); else dims (cols, rows, 1), whose boxes may run over the last column.
struct View {
    bool chunks;
    uint32_t box_cols;
    uint32_t box_rows;
    uint32_t box_chunks;
};

inline CUtensorMap encode_map(const TensorView& tensor, int device, const View& view, const Expected& expected) {
    void* address = address_of(tensor, device, expected);
    const std::string where = std::string(expected.program) + ": " + expected.name;
    TVM_FFI_CHECK(tensor.ndim() == 2, ValueError) << where << " must be a matrix; got rank " << tensor.ndim();
    const uint64_t rows = tensor.size(0);
    const uint64_t cols = tensor.size(1);
    const uint64_t pitch_bytes = static_cast<uint64_t>(tensor.stride(0)) * 2;
    TVM_FFI_CHECK(rows > 0 && cols > 0, ValueError) << where << " is empty: [" << rows << ", " << cols << "]";
    TVM_FFI_CHECK(pitch_bytes % 16 == 0, ValueError)
        << where << " has a row pitch of " << pitch_bytes << " bytes; a tensor map needs a multiple of 16";
    TVM_FFI_CHECK(!view.chunks || cols % view.box_cols == 0, ValueError)
        << where << " has " << cols << " columns; this program needs a multiple of " << view.box_cols;
    const uint64_t dims[3] = {
        view.chunks ? view.box_cols : cols, rows, view.chunks ? cols / view.box_cols : 1};
    const uint64_t strides[2] = {pitch_bytes, view.chunks ? view.box_cols * 2 : pitch_bytes * rows};
    const cuuint32_t box[3] = {view.box_cols, view.box_rows, view.box_chunks};
    const cuuint32_t element_strides[3] = {1, 1, 1};
    CUtensorMap map;
    const CUresult status = tensor_map_encoder(expected.program)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, address, dims, strides, box, element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    TVM_FFI_CHECK(status == CUDA_SUCCESS, RuntimeError)
        << where << ": cuTensorMapEncodeTiled failed with CUresult " << static_cast<int>(status) << " for [" << rows
        << ", " << cols << "], pitch " << pitch_bytes << " bytes, box ("
        << box[0] << ", " << box[1] << ", " << box[2] << ")";
    if (is_small_and_loose(3, dims, strides, 2) && has_the_fault_of_small_maps(device, expected.program)) {
        map.opaque[1] = without_the_faulty_bit(map.opaque[1]);
    }
    return map;
}

// The launch attributes that the registry records for a program.
struct Attributes {
    uint32_t threads;
    uint32_t cluster_ctas;
    bool cooperative;
    bool programmatic;
    uint32_t dynamic_smem_bytes;
};

inline void launch(
    const void* kernel, const Attributes& attributes, dim3 grid_ctas, int device, void** arguments,
    const char* program) {
    TVM_FFI_CHECK(grid_ctas.x % attributes.cluster_ctas == 0, ValueError)
        << program << ": a grid of " << grid_ctas.x << " CTAs is not a multiple of the cluster of "
        << attributes.cluster_ctas;
    check(
        cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(attributes.dynamic_smem_bytes)),
        "cudaFuncSetAttribute(max dynamic shared memory)", program);
    cudaLaunchAttribute list[3];
    unsigned count = 0;
    if (attributes.cluster_ctas > 1) {
        list[count].id = cudaLaunchAttributeClusterDimension;
        list[count].val.clusterDim.x = attributes.cluster_ctas;
        list[count].val.clusterDim.y = 1;
        list[count++].val.clusterDim.z = 1;
    }
    if (attributes.cooperative) {
        list[count].id = cudaLaunchAttributeCooperative;
        list[count++].val.cooperative = 1;
    }
    if (attributes.programmatic) {
        list[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        list[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid_ctas;
    config.blockDim = dim3(attributes.threads, 1, 1);
    config.dynamicSmemBytes = attributes.dynamic_smem_bytes;
    config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    config.attrs = list;
    config.numAttrs = count;
    check(cudaLaunchKernelExC(&config, kernel, arguments), "cudaLaunchKernelExC", program);
}

}  // namespace cake_host
