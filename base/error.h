// The one exception that programs throw. Caught once, in cli: the message is all a user sees.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace pathattn {

// message: what is wrong, where (file, key, line), and how to mend it, in one sentence without a trailing newline.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw Error(fmt::format(format, std::forward<Arguments>(arguments)...));
}

}  // namespace pathattn
