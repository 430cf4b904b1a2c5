// Results on stdout, which may be a full disk.
#pragma once

#include <string_view>

namespace pathattn {

// Writes `text` at once. Error if not all of it could be written.
void write_standard_output(std::string_view text);

}  // namespace pathattn
