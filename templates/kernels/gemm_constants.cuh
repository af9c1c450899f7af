//# What a prefill GEMM's key gives on the compile line, its Cfg, and what of both has one name in every GEMM.
// Given on the compile line, so that one text serves every TP degree.
//% if spec.role == "front_gemm"
constexpr unsigned kSharedCols = I_LOCAL;  // columns of shared_act: the up rows start there
constexpr unsigned kNumNTiles = N_TILES;
constexpr unsigned kSharedTiles = S_TILES;
//% else
constexpr unsigned kDownBlocks = K2_ITERS;
constexpr unsigned kNumK = NUM_K_ITERS;
static_assert(K1_ITERS + K2_ITERS == NUM_K_ITERS, "up and down blocks make up K");
//% endif
/*% include "kernels/cfg.cuh" %*/

//% if spec.role == "front_gemm"
constexpr u32 kNumK = Cfg::kNumK;
//% else
constexpr u32 kNumNTiles = Cfg::kNumNTiles;
//% endif
