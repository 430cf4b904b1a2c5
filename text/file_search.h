// Files that a user names by path, by folder or by pattern.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace pathattn {

struct FoundFile {
  std::string name;  // below the folder or the fixed part of the pattern, '/' between parts: the same wherever the folder lies
  std::filesystem::path path;
  bool named_itself;  // as a file, not through a folder or a pattern
};

// The regular files that `what` (a file, a folder or a pattern; see CorpusSource) stands for, sorted by name. Error if it does not exist, matches
// nothing, or a folder on the way cannot be read.
std::vector<FoundFile> find_files(const std::string& what, const std::vector<std::string>& extensions);

}  // namespace pathattn
