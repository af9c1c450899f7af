#pragma once

#include "device/base.cuh"

namespace cake {

// Where segments of cut tiles leave their fp32 sums, and count their arrivals; every launch leaves the counters at 0.
struct Partials {
    float* sums;
    u32* counters;
};

}  // namespace cake
