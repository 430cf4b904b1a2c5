// For tests: what the Error says that an action throws.
#pragma once

#include <functional>
#include <string>

#include "base/error.h"

namespace pathattn {

// Empty if the action throws no Error.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace pathattn
