// Shares out the work of a call: small units whole, one worker each; large ones phase by phase, the tasks of a phase among all workers.
// A unit's result is the same either way, so it depends on neither the number of workers nor the other units.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/executor.h"

namespace pathattn::cpu {

// Tasks are handed out one at a time in ascending order, whatever way the executor hands out its own. Those of one `runner` never run at once;
// there are at most min(num_tasks, num_workers) of them.
template <typename Run>
void share_out(const Executor& executor, int64_t num_tasks, Run&& run) {
  std::atomic<int64_t> next{0};
  executor.parallel_for(std::min<int64_t>(num_tasks, executor.num_workers), [&](int64_t runner, int worker) {
    for (int64_t task = next.fetch_add(1, std::memory_order_relaxed); task < num_tasks; task = next.fetch_add(1, std::memory_order_relaxed)) {
      run(task, worker, runner);
    }
  });
}

inline int64_t num_slots(int64_t num_units, int num_workers) { return std::min<int64_t>(num_units, num_workers); }

// `work` has num_slots slots, each with room for one unit, and offers
//   double cost(unit)            relative
//   void open(unit, slot)        the slot's phases are the unit's from now on
//   int num_phases(slot)         one after another
//   int64_t num_tasks(slot, phase), void run(slot, phase, task, worker)       tasks of a phase in any order, at once
template <typename Work>
void run_units(const Executor& executor, int64_t num_units, Work& work) {
  if (num_units == 0) return;
  double total = 0;
  for (int64_t u = 0; u < num_units; ++u) total += work.cost(u);
  const double largest = executor.num_workers == 1 ? total : total / (4.0 * executor.num_workers);
  const auto is_large = [&](int64_t u) { return work.cost(u) > largest; };
  const int64_t slots = num_slots(num_units, executor.num_workers);
  for (int64_t u = 0; u < num_units;) {
    int64_t used = 0;
    int phases = 0;
    for (; u < num_units && used < slots; ++u) {
      if (!is_large(u)) continue;
      work.open(u, used);
      phases = std::max(phases, work.num_phases(used++));
    }
    for (int phase = 0; phase < phases; ++phase) {
      int64_t tasks = 0;
      for (int64_t slot = 0; slot < used; ++slot) tasks += phase < work.num_phases(slot) ? work.num_tasks(slot, phase) : 0;
      share_out(executor, tasks, [&](int64_t task, int worker, int64_t) {
        int64_t slot = 0;
        for (;; ++slot) {
          const int64_t here = phase < work.num_phases(slot) ? work.num_tasks(slot, phase) : 0;
          if (task < here) break;
          task -= here;
        }
        work.run(slot, phase, task, worker);
      });
    }
  }
  share_out(executor, num_units, [&](int64_t u, int worker, int64_t slot) {
    if (is_large(u)) return;
    work.open(u, slot);
    for (int phase = 0; phase < work.num_phases(slot); ++phase) {
      for (int64_t task = 0; task < work.num_tasks(slot, phase); ++task) work.run(slot, phase, task, worker);
    }
  });
}

}  // namespace pathattn::cpu
