// The workspace of a call that goes unit by unit: a slot for each unit at work, with the unit's arrays, and a scratch for each worker.
#pragma once

#include "kernels/cpu/layout.h"
#include "kernels/cpu/schedule.h"

namespace pathattn::cpu {

template <typename UnitArrays, typename Scratch>
struct UnitWorkspace {
  int64_t longest;
  size_t bytes_of_slot, bytes_of_scratch;
  char *slots, *scratches;
  Unit* units;
  size_t used;

  UnitWorkspace(void* memory, const Problem& p, bool has_w, int num_workers) : longest(longest_document(p)) {
    Arena slot(nullptr), scratch(nullptr), all(memory);
    UnitArrays(slot, p, has_w, longest);
    Scratch(scratch, p);
    bytes_of_slot = slot.used();
    bytes_of_scratch = scratch.used();
    const int64_t count = num_slots(num_units(p), num_workers);
    slots = all.take<char>(count * bytes_of_slot);
    scratches = all.take<char>(num_workers * bytes_of_scratch);
    units = all.take<Unit>(count);
    used = all.used();
  }
};

}  // namespace pathattn::cpu
