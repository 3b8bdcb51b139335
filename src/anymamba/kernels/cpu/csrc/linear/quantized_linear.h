// Quantized weights outside of decode steps: products with few rows, and dequantization.
#pragma once

#include "schema.h"
#include "linear/gemv.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

template <typename T>
bool quantized_matmul(const QuantizedMatmulArgs& args) {
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  const auto emit = [&](int64_t col, int64_t row, const T* products, int count) {
    std::memcpy(y + col * args.out + row, products, count * sizeof(T));
  };
  bool ok = true;
  with_rows<T>(args.codes, args.scales, args.format, args.out, args.in, [&](const auto& weight) {
    Arena count;
    operand(count, weight, static_cast<const T*>(nullptr), 0, args.rows);
    const int64_t rows = task_rows(weight), tasks = (args.out + rows - 1) / rows;
    const int team = team_size(args.threads, tasks);
    const Scratch scratch(count.used() * team);
    if (!(ok = scratch.get() != nullptr)) return;
    Queue queue;
    run_team(team, [&](int thread) {
      Arena arena(static_cast<char*>(scratch.get()) + count.used() * thread);
      auto rows_of_x = operand(arena, weight, x, args.in, args.rows);
      const auto run = [&](int64_t task) {
        const int64_t start = task * rows, stop = start + rows < args.out ? start + rows : args.out;
        rows_of_x.prepare();
        small_product(weight, start, stop, rows_of_x, emit);
      };
      queue.parallel_for(tasks, thread, team, run, [] {}, [] {});
    });
  });
  return ok;
}

template <typename T>
bool dequantize(const DequantizeArgs& args) {
  T* target = static_cast<T*>(args.weight);
  bool ok = true;
  with_rows<T>(args.codes, args.scales, args.format, args.out, args.in, [&](const auto& weight) {
    const int64_t rows = task_rows(weight);
    ok = run_tasks((args.out + rows - 1) / rows, args.threads, 0, [&](int64_t task, void*) {
      const int64_t start = task * rows, stop = start + rows < args.out ? start + rows : args.out;
      convert_rows<T>(target + start * args.in, weight.from(start), stop - start);
    });
  });
  return ok;
}

}  // namespace ANYMAMBA_ISA
