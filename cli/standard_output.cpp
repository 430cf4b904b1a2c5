#include "cli/standard_output.h"

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "base/error.h"

namespace pathattn {

void write_standard_output(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return;
  fail("cannot write to standard output: {}; send it to another place", std::generic_category().message(errno));
}

}  // namespace pathattn
