#include "text/file_search.h"

#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <span>

#include "base/error.h"

namespace pathattn {
namespace {

namespace fs = std::filesystem;
using Parts = std::span<const std::string>;

constexpr std::string_view kWildcards = "*?[";
const std::string kAnyFolders = "**";

// Walks down the parts of a pattern; a map, because ** twice can reach a file on two ways.
class Search {
 public:
  explicit Search(const std::vector<std::string>& extensions) : extensions_(extensions) {}

  std::map<std::string, FoundFile> found;

  // folder: where the walk is; below: its name below the start, empty or ending in '/'; parts: what is left of the pattern.
  void walk(const fs::path& folder, const std::string& below, Parts parts) {
    const std::string& part = parts.front();
    if (part == kAnyFolders) walk(folder, below, parts.subspan(1));
    std::error_code error;
    fs::directory_iterator entry(folder, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      std::error_code unknown;  // a link to nowhere is neither a folder nor a file
      if (part == kAnyFolders) {
        if (name.front() != '.' && entry->is_directory(unknown) && !entry->is_symlink(unknown)) walk(entry->path(), below + name + "/", parts);
      } else if (::fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) != 0) {
        continue;
      } else if (parts.size() > 1) {
        if (entry->is_directory(unknown)) walk(entry->path(), below + name + "/", parts.subspan(1));
      } else if (entry->is_regular_file(unknown) && wanted(name)) {
        found[below + name] = {below + name, entry->path(), false};
      }
    }
    if (error) fail("cannot list the folder {}: {}", folder.string(), error.message());
  }

 private:
  bool wanted(const std::string& name) const {
    return extensions_.empty() ||
           std::any_of(extensions_.begin(), extensions_.end(), [&name](const std::string& extension) { return name.ends_with(extension); });
  }

  const std::vector<std::string>& extensions_;
};

}  // namespace

std::vector<FoundFile> find_files(const std::string& what, const std::vector<std::string>& extensions) {
  const fs::path path(what);
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_regular_file(status)) return {{path.filename().string(), path, true}};
  fs::path start;
  std::vector<std::string> parts;
  if (fs::is_directory(status)) {
    start = path;
    parts = {kAnyFolders, "*"};
  } else if (fs::exists(status)) {
    fail("{} is neither a file nor a folder", what);
  } else if (what.find_first_of(kWildcards) == std::string::npos) {
    fail("{}: {}", what, error ? error.message() : "no such file or folder");
  } else {
    for (const fs::path& part : path) {
      const std::string text = part.string();
      if (text.empty() || (text == kAnyFolders && !parts.empty() && parts.back() == kAnyFolders)) continue;
      if (parts.empty() && text.find_first_of(kWildcards) == std::string::npos) {
        start /= part;
      } else {
        parts.push_back(text);
      }
    }
    if (parts.back() == kAnyFolders) parts.push_back("*");
    if (start.empty()) start = ".";
    if (!fs::is_directory(start, error)) fail("nothing matches {}: there is no folder {}", what, start.string());
  }
  Search search(extensions);
  search.walk(start, "", parts);
  if (search.found.empty()) fail("{} {}", fs::is_directory(status) ? "there is no file of the wanted kind in the folder" : "no file matches", what);
  std::vector<FoundFile> files;
  for (auto& [name, file] : search.found) files.push_back(std::move(file));
  return files;
}

}  // namespace pathattn
