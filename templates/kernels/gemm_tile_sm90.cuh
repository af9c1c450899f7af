#pragma once

#include "device/base.cuh"
#include "kernels/gemm_work.cuh"
#include "kernels/ring.cuh"

namespace cake {

// Accumulators of one thread for 64 rows x kBlockN columns of its warpgroup (see wgmma_m64_k16 for which is which),
// and for all rows of a tile that are the warpgroup's.
template <class Cfg>
using BlockSums = float[Cfg::kBlockN / 2];
template <class Cfg>
using Accumulators = BlockSums<Cfg>[Cfg::kGroupBlocks];

// What a CTA multiplies of its pair's tile: kBlockM token rows by kBlockN weight rows. The CTAs of a pair share the
// weights, each with a row tile of its own; or they share the tokens of the lone row tile that ends an uneven number,
// each with a column of tiles of its own.
struct CtaTile {
    u32 row_tile;
    u32 n_tile;
    bool shares_tokens;
};

// Raster: groups of kRasterPairRows pair rows; inside a group the tiles of two columns follow each other, and of these
// the rows are fastest, so that neighbours in time share a weight tile. The lone row tile ends the last group: one pair
// takes it for two columns. Of an uneven number of columns the last has no other: there the CTAs share its weights, and
// rank 1's row tile lies past the end.
template <class Cfg>
__device__ __forceinline__ CtaTile tile_of(u32 tile, u32 row_tiles, u32 rank) {
    const u32 pair_rows = row_tiles / 2;
    const u32 last_group = (max(pair_rows, 1u) - 1) / Cfg::kRasterPairRows;
    const u32 group = min(tile / (Cfg::kRasterPairRows * Cfg::kNumNTiles), last_group);
    const u32 first_row = group * Cfg::kRasterPairRows;
    const u32 rows = min(static_cast<u32>(Cfg::kRasterPairRows), pair_rows - first_row);
    const u32 two_columns = 2 * rows + (group == last_group ? row_tiles % 2 : 0);
    const u32 inside = tile - first_row * Cfg::kNumNTiles;
    const u32 first_column = inside / two_columns * 2;
    const u32 columns = min(2u, Cfg::kNumNTiles - first_column);
    const u32 place = inside % two_columns;
    const bool paired = place < rows * columns;
    const bool shares_tokens = !paired && columns == 2;
    const u32 row_tile = paired ? 2 * (first_row + place % rows) : row_tiles - 1;
    const u32 n_tile = first_column + (paired ? place / rows : 0);
    return {row_tile + (shares_tokens ? 0 : rank), n_tile + (shares_tokens ? rank : 0), shares_tokens};
}

// The CTA's token rows in a tile: it loads and multiplies kBlockM rows from `loaded` on, and stores those of them in
// [first, end). A box that reaches past the matrix is filled with zeros slowly. So a ragged last row tile loads the
// last kBlockM rows of the matrix, the first of which are another tile's; a matrix of fewer rows is one box all the
// same. A row tile past the end has no rows, and `loaded` lies there too: its CTA loads its half of the weights, which
// its partner needs, but no tokens, and neither multiplies nor stores.
struct TokenRows {
    u32 loaded;
    u32 first;
    u32 end;

    __device__ __forceinline__ bool any() const {
        return loaded < end;
    }

    __device__ __forceinline__ bool holds(u32 row) const {
        return row >= first && row < end;
    }
};

template <class Cfg>
__device__ __forceinline__ TokenRows rows_of(u32 row_tile, u32 num_tokens) {
    const u32 first = row_tile * Cfg::kBlockM;
    const u32 last_box = max(num_tokens, static_cast<u32>(Cfg::kBlockM)) - Cfg::kBlockM;
    return {first < num_tokens ? min(first, last_box) : first, first, num_tokens};
}

// Goes past K blocks that the other warpgroup multiplies.
template <class Cfg>
__device__ __forceinline__ void skip(Ring<Cfg>& ring, u32 iterations) {
    const u32 stage = ring.stage + iterations;
    ring.stage = stage % Cfg::kNumStages;
    ring.phase ^= stage / Cfg::kNumStages & 1;
}

// Whether the MMA warpgroups take turns, each with all 128 rows of every other tile; else each has 64 rows of every
// tile.
template <class Cfg>
constexpr bool kTakeTurns = Cfg::kTileGroups == 1;

// The thread's position among the MMA warpgroups.
struct Fragment {
    u32 group;   // 0 or 1
    u32 thread;  // 0 to 127
    u32 warp;    // 0 to 3
    u32 lane;
};

// Which of the kTileGroups parts of a tile's rows is the warpgroup's.
template <class Cfg>
__device__ __forceinline__ u32 part_of(const Fragment& at) {
    return kTakeTurns<Cfg> ? 0 : at.group;
}

// First of the warp's 16 rows of a block, in the CTA's 128.
template <class Cfg>
__device__ __forceinline__ u32 first_row(const Fragment& at, u32 block) {
    return 64 * (part_of<Cfg>(at) + block) + 16 * at.warp;
}

}  // namespace cake
