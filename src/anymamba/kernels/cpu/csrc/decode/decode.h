// One token of each row through a program: step after step in one team of threads.
//
// Threads wait for each other after every step, so there are as few as there can be: a step is a phase, the convolution
// of what it projects, and the phases after it that are too short to be shared.
#pragma once

#include "decode/step_linear.h"
#include "decode/step_mamba1.h"
#include "decode/step_mamba2.h"
#include "decode/step_mamba3.h"
#include "decode/step_pointwise.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kTeamBytes = 128 << 10;  // a program that reads less is not worth waking threads
constexpr int64_t kShortRows = 2;          // up to so many rows are normed in less time than it takes to share them

template <typename Args>
const Args& args_of(const Phase& phase) {
  return *static_cast<const Args*>(phase.args);
}

// The convolution that belongs to the step of a projection.
inline const ConvPhase* convolution_of(const Phase* phase, const Phase* end) {
  if (phase->kind != kLinear || phase + 1 == end || phase[1].kind != kConv) return nullptr;
  const ConvPhase& conv = args_of<ConvPhase>(phase[1]);
  return is_convolved(args_of<LinearPhase>(*phase), conv) ? &conv : nullptr;
}

inline bool is_short(const Phase& phase, int64_t batch) {
  return batch <= kShortRows && (phase.kind == kNorm || phase.kind == kGate || phase.kind == kScale);
}

// Where the step ends that begins with a phase.
inline const Phase* step_end(const Phase* phase, const Phase* end, int64_t batch) {
  const Phase* next = phase + (convolution_of(phase, end) ? 2 : 1);
  while (next != end && is_short(*next, batch)) ++next;
  return next;
}

template <typename T>
size_t phase_scratch(const Phase& phase, int64_t batch) {
  switch (phase.kind) {
    case kNorm:
      return norm_scratch<T>(args_of<NormPhase>(phase));
    case kScale:
      return static_cast<size_t>(args_of<ScalePhase>(phase).width) * sizeof(T);
    case kLinear:
      return linear_scratch<T>(args_of<LinearPhase>(phase), batch);
    case kConv:
      return conv_scratch<T>(args_of<ConvPhase>(phase));
    case kMamba1:
      return mamba1_scratch<T>(args_of<Mamba1Phase>(phase));
    case kMamba2:
      return mamba2_scratch<T>(args_of<Mamba2Phase>(phase));
    case kMamba3Tokens:
    case kMamba3Heads:
      return mamba3_scratch<T>(args_of<Mamba3Phase>(phase));
    default:
      return 0;
  }
}

template <typename T>
void run_phase(const Token<T>& token, const Phase& phase, const ConvPhase* conv = nullptr) {
  switch (phase.kind) {
    case kRead:
      return read_input(token, args_of<EdgePhase>(phase));
    case kWrite:
      return write_output(token, args_of<EdgePhase>(phase));
    case kNorm:
      return norm_rows(token, args_of<NormPhase>(phase));
    case kGate:
      return gate_rows(token, args_of<GatePhase>(phase));
    case kScale:
      return scale_rows(token, args_of<ScalePhase>(phase));
    case kLinear:
      return project_any(token, args_of<LinearPhase>(phase), conv);
    case kConv:
      return convolve(token, args_of<ConvPhase>(phase));
    case kMamba1:
      return mamba1_states(token, args_of<Mamba1Phase>(phase));
    case kMamba2:
      return mamba2_heads(token, args_of<Mamba2Phase>(phase));
    case kMamba3Tokens:
      return mamba3_tokens(token, args_of<Mamba3Phase>(phase));
    case kMamba3Heads:
      return mamba3_heads(token, args_of<Mamba3Phase>(phase));
  }
}

// What is left of a step when the work of its first phase is done.
template <typename T>
void finish_step(const Token<T>& token) {
  Token<T> alone = token;
  alone.queue = nullptr;
  for (const Phase* phase = token.rest; phase != token.rest_end; ++phase) run_phase(alone, *phase);
}

template <typename T>
void run_steps(Token<T> token) {
  const Phase* const end = token.args.phases + token.args.count;
  for (const Phase* phase = token.args.phases; phase != end; phase = token.rest_end, ++token.queue) {
    const ConvPhase* conv = convolution_of(phase, end);
    token.rest = phase + (conv ? 2 : 1);
    token.rest_end = step_end(phase, end, token.args.batch);
    const bool is_weight_next = token.rest_end != end && token.rest_end->kind == kLinear;
    token.next = is_weight_next
                     ? first_weights<T>(args_of<LinearPhase>(*token.rest_end), token.thread, token.team)
                     : nullptr;
    run_phase(token, *phase, conv);
  }
}

// What a program needs beside its slots.
struct Needs {
  size_t scratch = 0;             // bytes of a thread
  int64_t steps = 0, weights = 0;  // and how many bytes these read
};

template <typename T>
Needs needs_of(const ProgramArgs& args) {
  Needs needs;
  size_t conv = 0;  // a projection has its own scratch and that of its convolution
  const Phase* const end = args.phases + args.count;
  for (const Phase* phase = args.phases; phase != end; ++phase) {
    const size_t bytes = phase_scratch<T>(*phase, args.batch);
    if (phase->kind == kConv) conv = bytes > conv ? bytes : conv;
    needs.scratch = bytes > needs.scratch ? bytes : needs.scratch;
    if (phase->kind == kLinear) needs.weights += linear_bytes(args_of<LinearPhase>(*phase));
  }
  needs.scratch = (needs.scratch + conv + 63) / 64 * 64;
  for (const Phase* phase = args.phases; phase != end; phase = step_end(phase, end, args.batch)) ++needs.steps;
  return needs;
}

template <typename T>
bool run_program(const ProgramArgs& args) {
  const Needs needs = needs_of<T>(args);
  const int team = team_size(args.threads, needs.weights < kTeamBytes ? 1 : args.threads);
  // Everything is there before the threads come, so that none waits for another to begin.
  const Scratch slots(static_cast<size_t>(args.batch * args.width) * sizeof(T)), scratch(needs.scratch * team);
  const Queues queues(needs.steps);
  if (!slots.get() || !scratch.get() || !queues.get()) return false;
  static Teams teams;
  teams.run(team, [&](int size) {
    run_team(size, [&](int thread) {
      void* own = static_cast<char*>(scratch.get()) + needs.scratch * thread;
      run_steps(Token<T>{args, static_cast<T*>(slots.get()), queues.get(), thread, size, own, finish_step<T>});
    });
  });
  return true;
}

}  // namespace ANYMAMBA_ISA
