#pragma once
// Every PTX instruction that kernels of all architectures use, one function an instruction. Needs no toolkit header.

#include "${header("device/base.cuh") | file_name}"
#include "${header("device/memory.cuh") | file_name}"
#include "${header("device/mbarrier.cuh") | file_name}"
#include "${header("device/tma.cuh") | file_name}"
#include "${header("device/cluster.cuh") | file_name}"
#include "${header("device/grid.cuh") | file_name}"
#include "${header("device/math.cuh") | file_name}"
