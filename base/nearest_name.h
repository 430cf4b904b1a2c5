// What a mistyped name was meant to be.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pathattn {

// The one of `names` that the fewest letters put in, taken out or changed turn `name` into; none if they are more than a third of its letters.
std::optional<std::string> nearest_name(std::string_view name, const std::vector<std::string>& names);

}  // namespace pathattn
