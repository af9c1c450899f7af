#pragma once
// PTX that only Blackwell's GEMMs use.

#include "${header("device/tcgen05_pair.cuh") | file_name}"
#include "${header("device/tma_pair.cuh") | file_name}"
#include "${header("device/launch_control.cuh") | file_name}"
#include "${header("device/wide_store.cuh") | file_name}"
#include "${header("device/tma_store.cuh") | file_name}"
