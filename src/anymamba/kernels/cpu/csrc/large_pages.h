// Large pages for scratch memory of megabytes.
//
// Between two calls such memory mostly goes back to the system, which maps it again in the next call, page by page as
// it is first touched. With pages of 4 KiB that took a fifth of the scan's backward.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ANYMAMBA_ISA {

// Asks for pages of 2 MiB where the memory has whole ones. A hint: no result depends on whether the system follows it.
inline void prefer_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + page - 1) / page * page, stop = (begin + bytes) / page * page;
  if (first < stop) madvise(reinterpret_cast<void*>(first), stop - first, MADV_HUGEPAGE);
#endif
}

}  // namespace ANYMAMBA_ISA
