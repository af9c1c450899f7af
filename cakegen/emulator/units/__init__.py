"""What works beside the warps: barriers, TMA, wgmma, tcgen05."""
