// Weights in narrow formats outside of programs: a product with few rows, and rows as plain numbers.
#pragma once

#include "arguments.h"
#include "linear.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

// body(rows, start, stop, scratch) for tasks over the rows of a weight.
template <typename T, typename Args, typename Body>
bool over_rows(const Args& args, size_t bytes, const Body& body) {
  bool ok = true;
  with_rows<T>(args.codes, args.scales, args.format, args.in, [&](const auto& weight) {
    const int64_t rows = task_rows(weight);
    ok = run_tasks((args.out + rows - 1) / rows, args.threads, bytes, [&](int64_t task, void* scratch) {
      const int64_t start = task * rows, stop = start + rows < args.out ? start + rows : args.out;
      body(weight, start, stop, scratch);
    });
  });
  return ok;
}

template <typename T>
bool narrow_product(const NarrowProductArgs& args) {
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  return over_rows<T>(args, kDotRows * args.in * sizeof(T),
                      [&](const auto& weight, int64_t start, int64_t stop, void* scratch) {
                        const auto emit = [&](int64_t col, int64_t row, const T* products, int count) {
                          std::memcpy(y + col * args.out + row, products, count * sizeof(T));
                        };
                        small_product(weight, start, stop, x, args.in, args.rows, static_cast<T*>(scratch), emit);
                      });
}

template <typename T>
bool widen(const WidenArgs& args) {
  T* wide = static_cast<T*>(args.wide);
  return over_rows<T>(args, 0, [&](const auto& weight, int64_t start, int64_t stop, void*) {
    widen_rows<T>(wide + start * args.in, weight.from(start), stop - start);
  });
}

}  // namespace ANYMAMBA_ISA
