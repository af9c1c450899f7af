#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/launch_control.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_work.cuh"

namespace cake {

// Where a pair tile lies. Raster: groups of kRasterPairRows pair rows; inside a group rows are fastest, so that
// neighbours in time share a weight tile.
struct TilePlace {
    u32 pair_row;
    u32 n_tile;
};

template <class Cfg>
__device__ __forceinline__ TilePlace place_of(u32 tile, u32 pair_rows) {
    const u32 group = tile / (Cfg::kRasterPairRows * Cfg::kNumNTiles);
    const u32 first_row = group * Cfg::kRasterPairRows;
    const u32 rows = min(static_cast<u32>(Cfg::kRasterPairRows), pair_rows - first_row);
    const u32 inside = tile - first_row * Cfg::kNumNTiles;
    return {first_row + inside % rows, inside / rows};
}

// Arrives at CTA 0's barrier. Only CTA 1 needs the cluster's scope, and the memory barrier that comes with it: the one
// thread that multiplies, whom it would hold up, is in CTA 0.
__device__ __forceinline__ void arrive_at_leader(u32 barrier, u32 rank) {
    if (rank == 0) {
        mbarrier_arrive(barrier);
    } else {
        mbarrier_arrive_cluster(mapa(barrier, 0));
    }
}

// Who walks the cluster's work: the loaders of both CTAs and the thread that multiplies, one thread each, and the
// epilogue warps of both.
enum class Role { kLoader, kMultiplier, kEpilogue };

// The grid has a cluster an item. At the start of an item CTA 0's loader asks for the next one; the answer to request n
// comes to both CTAs, to slot n % 2. Every reader takes it there, and tells CTA 0 (item_empty). Where
// the whole grid is resident, nobody asks: kOneItem.
template <class Cfg, Role kRole>
class ClusterWork {
  public:
    __device__ __forceinline__ ClusterWork(const Split& split, u32 rank, u32 smem, const Watch& watch)
        : split_(split), list_(split, blockIdx.x / 2, split.num_items), rank_(rank), smem_(smem) {
        request(watch);
    }

    __device__ __forceinline__ bool next(Work& work, const Watch& watch) {
        while (!list_.next(work)) {
            const u32 item = next_item(watch);
            if (item == kNoCluster) {
                return false;
            }
            list_ = WorkList<Cfg>(split_, item, split_.num_items);
            is_known_ = false;
            request(watch);
        }
        return true;
    }

    // Whether nothing comes after the work that `next` gave last.
    __device__ __forceinline__ bool is_last(const Watch& watch) {
        return list_.ends() && next_item(watch) == kNoCluster;
    }

  private:
    __device__ __forceinline__ void request(const Watch& watch) {
        if constexpr (kRole == Role::kLoader && !Cfg::kOneItem) {
            const u32 slot = count_ % 2;
            const u32 full = smem_ + Cfg::kItemFullOffset + slot * 8;
            if (rank_ == 0) {
                mbarrier_wait_cluster(smem_ + Cfg::kItemEmptyOffset + slot * 8, (count_ / 2 & 1) ^ 1, watch);
            }
            mbarrier_arrive_expect_tx(full, Cfg::kAnswerBytes);
            if (rank_ == 0) {
                try_cancel_cluster(smem_ + Cfg::kAnswersOffset + slot * Cfg::kAnswerBytes, full);
            }
        }
    }

    // The item after this one, or kNoCluster.
    __device__ __forceinline__ u32 next_item(const Watch& watch) {
        if constexpr (Cfg::kOneItem) {
            return kNoCluster;
        } else {
            if (!is_known_) {
                next_item_ = take_answer(watch);
                is_known_ = true;
            }
            return next_item_;
        }
    }

    __device__ __forceinline__ u32 take_answer(const Watch& watch) {
        const u32 slot = count_ % 2;
        mbarrier_wait_cluster(smem_ + Cfg::kItemFullOffset + slot * 8, count_ / 2 & 1, watch);
        const u32 first = query_cancelled_cluster(smem_ + Cfg::kAnswersOffset + slot * Cfg::kAnswerBytes);
        // The next answer to this slot is written by the asynchronous proxy.
        fence_proxy_async_shared();
        if constexpr (kRole == Role::kEpilogue) {
            warp_sync();
        }
        if (kRole != Role::kEpilogue || lane_id() == 0) {
            arrive_at_leader(smem_ + Cfg::kItemEmptyOffset + slot * 8, rank_);
        }
        ++count_;
        return first == kNoCluster ? kNoCluster : first / 2;
    }

    Split split_;
    WorkList<Cfg> list_;
    u32 rank_;
    u32 smem_;
    u32 count_ = 0;  // answers taken
    u32 next_item_ = kNoCluster;
    bool is_known_ = false;  // the answer about it is taken
};

}  // namespace cake
