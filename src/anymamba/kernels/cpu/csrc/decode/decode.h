// A decode step: a few tokens of each sequence through a list of phases, stage after stage in one team of threads.
//
// Every token is a row. Most phases take rows one by one; those that carry something from token to token take the rows of
// a sequence in their order (`StepContext::for_tokens`), so a window of tokens gives the same bits as one at a time.
//
// Threads wait for each other after every stage, so there are as few as possible: a stage is a phase, the convolution
// of what it projects, and the phases after it that are too short to distribute.
#pragma once

#include "decode/step_attention.h"
#include "decode/step_linear.h"
#include "decode/step_mamba1.h"
#include "decode/step_mamba2.h"
#include "decode/step_mamba3.h"
#include "decode/step_pointwise.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kTeamBytes = 128 << 10;  // a step that reads less is not worth waking threads
constexpr int64_t kShortRows = 2;          // up to this many rows, distributing a row-wise phase costs more than it saves

template <typename Args>
const Args& args_of(const Phase& phase) {
  return *static_cast<const Args*>(phase.args);
}

// The convolution that belongs to the stage of a projection; null for none.
inline const ConvPhase* fused_conv(const Phase* phase, const Phase* end) {
  if (phase->kind != kLinear || phase + 1 == end || phase[1].kind != kConv) return nullptr;
  const ConvPhase& conv = args_of<ConvPhase>(phase[1]);
  return can_fuse_conv(args_of<LinearPhase>(*phase), conv) ? &conv : nullptr;
}

inline bool is_short(const Phase& phase, int64_t batch) {
  return batch <= kShortRows && (phase.kind == kNorm || phase.kind == kGate || phase.kind == kScale);
}

// Where the stage ends that begins with a phase.
inline const Phase* stage_end(const Phase* phase, const Phase* end, int64_t batch) {
  const Phase* next = phase + (fused_conv(phase, end) ? 2 : 1);
  while (next != end && is_short(*next, batch)) ++next;
  return next;
}

// body(kind, phase) with the kind and the structure of a phase as types: the only switch over kinds.
template <typename Body>
void with_phase(const Phase& phase, const Body& body) {
  switch (phase.kind) {
#define ANYMAMBA_CASE(kind, structure) \
  case kind:                           \
    return body(Kind<kind>{}, args_of<structure>(phase));
    ANYMAMBA_PHASES(ANYMAMBA_CASE)
#undef ANYMAMBA_CASE
  }
}

template <typename T>
size_t scratch_of(const Phase& phase, int64_t batch) {
  size_t bytes = 0;
  with_phase(phase, [&](auto, const auto& args) { bytes = phase_scratch<T>(args, batch); });
  return bytes;
}

template <typename T>
void run(const StepContext<T>& context, const Phase& phase) {
  with_phase(phase, [&](auto kind, const auto& args) { run_phase(kind, context, args); });
}

// Runs the rest of a stage when the work of its first phase is done.
template <typename T>
void finish_stage(const StepContext<T>& context) {
  StepContext<T> alone = context;
  alone.queue = nullptr;
  for (const Phase* phase = context.rest; phase != context.rest_end; ++phase) run(alone, *phase);
}

template <typename T>
void run_stages(StepContext<T> context) {
  const Phase* const end = context.args.phases + context.args.count;
  for (const Phase* phase = context.args.phases; phase != end; phase = context.rest_end, ++context.queue) {
    context.conv = fused_conv(phase, end);
    context.rest = phase + (context.conv ? 2 : 1);
    context.rest_end = stage_end(phase, end, context.args.batch);
    const bool is_weight_next = context.rest_end != end && context.rest_end->kind == kLinear;
    context.next = is_weight_next
                     ? first_weights<T>(args_of<LinearPhase>(*context.rest_end), context.thread, context.team)
                     : nullptr;
    run(context, *phase);
  }
}

// What a step requires in addition to its slots.
struct Requirements {
  size_t scratch = 0;               // bytes per thread
  int64_t stages = 0, weights = 0;  // weights: bytes that projections read
};

template <typename T>
Requirements find_requirements(const StepArgs& args) {
  Requirements requirements;
  size_t conv = 0;  // a projection has its own scratch and that of its convolution
  const Phase* const end = args.phases + args.count;
  for (const Phase* phase = args.phases; phase != end; ++phase) {
    const size_t bytes = scratch_of<T>(*phase, args.batch);
    if (phase->kind == kConv) conv = bytes > conv ? bytes : conv;
    requirements.scratch = bytes > requirements.scratch ? bytes : requirements.scratch;
    if (phase->kind == kLinear) requirements.weights += linear_bytes(args_of<LinearPhase>(*phase));
  }
  requirements.scratch = (requirements.scratch + conv + 63) / 64 * 64;
  for (const Phase* phase = args.phases; phase != end; phase = stage_end(phase, end, args.batch)) ++requirements.stages;
  return requirements;
}

template <typename T>
bool decode_step(const StepArgs& args) {
  const Requirements requirements = find_requirements<T>(args);
  const bool is_small = !args.replayed && requirements.weights < kTeamBytes;
  const int team = team_size(args.threads, is_small ? 1 : args.threads);
  // Everything is allocated before the threads start, so that none waits for another.
  const Scratch memory(args.slots ? 0 : static_cast<size_t>(args.batch * args.width) * sizeof(T));
  const Scratch scratch(requirements.scratch * team);
  const Queues queues(requirements.stages);
  if (!memory.get() || !scratch.get() || !queues.get()) return false;
  T* slots = static_cast<T*>(args.slots ? args.slots : memory.get());
  static Teams teams;
  teams.run(team, [&](int size) {
    run_team(size, [&](int thread) {
      void* own = static_cast<char*>(scratch.get()) + requirements.scratch * thread;
      run_stages(StepContext<T>{args, slots, queues.get(), thread, size, own, finish_stage<T>});
    });
  });
  return true;
}

}  // namespace ANYMAMBA_ISA
