#pragma once

#include "device/base.cuh"

namespace cake {

// How the cut tiles of a launch are laid out; counts of items, iterations and segments.
struct Split {
    u32 num_items;
    u32 full_items;
    u32 sk_ipc;
    u32 sk_max_seg;
    u32 sk_total;
};

// K iterations [k_begin, k_end) of one pair tile. A tile of several segments is `cut` in its number among the cut
// tiles.
struct Work {
    u32 tile;
    u32 k_begin;
    u32 k_end;
    u32 cut;
    u32 segment;
    u32 num_segments;
};

// The work of one cluster, in order; every role walks the same list. Item c < full_items is a whole tile; item
// full_items + j covers iterations [j * sk_ipc, (j + 1) * sk_ipc) of all cut tiles laid end to end, and may cross
// tiles.
template <class Cfg>
class WorkList {
  public:
    __device__ __forceinline__ WorkList(const Split& split, u32 first, u32 step)
        : split_(split), item_(first), step_(step) {}

    __device__ __forceinline__ bool next(Work& work) {
        if (position_ == end_) {
            if (item_ >= split_.num_items) {
                return false;
            }
            if (item_ < split_.full_items) {
                work = {item_, 0, Cfg::kNumK, 0, 0, 1};
                item_ += step_;
                return true;
            }
            run_ = item_ - split_.full_items;
            position_ = run_ * split_.sk_ipc;
            end_ = min(position_ + split_.sk_ipc, split_.sk_total);
            item_ += step_;
        }
        const u32 cut = position_ / Cfg::kNumK;
        const u32 k_begin = position_ - cut * Cfg::kNumK;
        const u32 k_end = min(Cfg::kNumK, k_begin + end_ - position_);
        const u32 first_run = cut * Cfg::kNumK / split_.sk_ipc;
        const u32 last_run = (cut * Cfg::kNumK + Cfg::kNumK - 1) / split_.sk_ipc;
        work = {split_.full_items + cut, k_begin, k_end, cut, run_ - first_run, last_run - first_run + 1};
        position_ += k_end - k_begin;
        return true;
    }

    // Whether `next` gives nothing more.
    __device__ __forceinline__ bool ends() const {
        return position_ == end_ && item_ >= split_.num_items;
    }

  private:
    Split split_;
    u32 item_;
    u32 step_;
    u32 run_ = 0;
    u32 position_ = 0;
    u32 end_ = 0;
};

}  // namespace cake
