// Lines for the user on stderr: what long work is doing, and how it ended.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

namespace pathattn {

// A log that cannot be written (full disk, closed stderr) ends no work: fmt::print would throw, this goes on.
template <typename... Arguments>
void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace pathattn
