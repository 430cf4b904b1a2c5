// Files that are either whole or not there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace pathattn {

// The whole file. Error names the path and the reason.
std::string read_file(const std::filesystem::path& path);

// Writes beside `path` under a temporary name, fsyncs, renames over `path`, fsyncs the folder. On failure (full disk, no permission)
// throws, removes the temporary, and leaves what was at `path` before. Creates missing parent folders. Follows a symbolic link; refuses to
// replace anything that is not a regular file. What a killed process left behind is removed by the next write of the same path.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);
void write_file_atomically(const std::filesystem::path& path, std::span<const std::string_view> pieces);  // the pieces one after the other

// Fills a new folder through `fill(temporary folder)`, fsyncs every file in it, then renames it to `path` (which must not exist).
// After a crash or an exception `path` does not exist; a stale temporary is removed by the next call.
void create_folder_atomically(const std::filesystem::path& path, const std::function<void(const std::filesystem::path&)>& fill);

// 64-bit hash of bytes, the same on every machine, for fingerprints and checksums (not for security). Changing any one byte changes it.
uint64_t hash_bytes(std::string_view bytes, uint64_t seed = 0);

}  // namespace pathattn
