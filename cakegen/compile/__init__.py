"""Text -> cubin or PTX: NVRTC, the compile cache, the resource report. Needs no GPU and no driver library."""

from cakegen.compile.cache import CacheWarning, cache_key, cached_cubin, clear_cache
from cakegen.compile.cache_folder import cache_root
from cakegen.compile.flat import flat_source
from cakegen.compile.nvrtc import Nvrtc, load_nvrtc
from cakegen.compile.parallel import Outcome, compile_many
from cakegen.compile.program import CompiledProgram, ResourceReport, compile_cubin, compile_ptx
from cakegen.compile.requests import CompileRequest, request_for

__all__ = [
    "CacheWarning",
    "CompileRequest",
    "CompiledProgram",
    "Nvrtc",
    "Outcome",
    "ResourceReport",
    "cache_key",
    "cache_root",
    "cached_cubin",
    "clear_cache",
    "compile_cubin",
    "compile_many",
    "compile_ptx",
    "flat_source",
    "load_nvrtc",
    "request_for",
]
