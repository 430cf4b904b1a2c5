// What was built: for --version and for the record of a run.
#pragma once

#include <string>

namespace pathattn {

std::string version();        // of this project, "0.1.0"
std::string commit();         // abbreviated git commit at build time, with "+" if files had changed; "unknown" outside a git tree
std::string torch_version();  // of the PyTorch built against, "2.11.0+cu130"

}  // namespace pathattn
