#include "base/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace pathattn {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporarySuffix = ".partial";

std::string reason(int error) { return std::generic_category().message(error); }

class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : number_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  bool valid() const { return number_ >= 0; }
  int get() const { return number_; }
  bool close() { return ::close(std::exchange(number_, -1)) == 0; }

 private:
  int number_;
};

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// A file or a folder to disk.
void sync(const fs::path& path) {
  Descriptor file(path, O_RDONLY);
  if (file.valid() && (::fsync(file.get()) == 0 || errno == EINVAL)) return;  // EINVAL: a file system that cannot flush folders
  fail("cannot flush {} to disk: {}", path.string(), reason(errno));
}

void create_folders(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return;
  create_folders(parent_of(path));
  if (!fs::create_directory(path, error) && error) fail("cannot create the folder {}: {}", path.string(), error.message());
  sync(parent_of(path));
}

// ".<name>.<process>.<count>.partial" beside `path`: no two writers share one, and what a dead process left can be told by its number.
fs::path temporary_beside(const fs::path& path) {
  static std::atomic<uint64_t> count{0};
  return parent_of(path) / fmt::format(".{}.{}.{}{}", path.filename().string(), ::getpid(), count++, kTemporarySuffix);
}

void remove_stale_temporaries(const fs::path& path) {
  const std::string prefix = fmt::format(".{}.", path.filename().string());
  std::error_code error;
  for (fs::directory_iterator entry(parent_of(path), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kTemporarySuffix)) continue;
    pid_t process = 0;
    const auto [rest, parsed] = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), process);
    if (parsed != std::errc() || *rest != '.' || process <= 0) continue;
    if (::kill(process, 0) != 0 && errno == ESRCH) {
      std::error_code ignored;
      fs::remove_all(entry->path(), ignored);
    }
  }
}

void write_pieces(const fs::path& path, std::span<const std::string_view> pieces) {
  Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
  bool written = file.valid();
  for (std::string_view piece : pieces) {
    while (written && !piece.empty()) {
      const ssize_t count = ::write(file.get(), piece.data(), piece.size());
      if (count >= 0) {
        piece.remove_prefix(static_cast<size_t>(count));
      } else if (errno != EINTR) {
        written = false;
      }
    }
  }
  if (!written || ::fsync(file.get()) != 0 || !file.close()) throw std::system_error(errno, std::generic_category());
}

}  // namespace

std::string read_file(const fs::path& path) {
  Descriptor file(path, O_RDONLY);
  struct stat facts {};
  if (!file.valid() || ::fstat(file.get(), &facts) != 0) fail("cannot open {}: {}", path.string(), reason(errno));
  if (S_ISDIR(facts.st_mode)) fail("cannot read {}: it is a folder, not a file", path.string());
  std::string bytes(static_cast<size_t>(std::max<off_t>(facts.st_size, 0)) + 1, '\0');  // one more, so that the end is seen without growing
  for (size_t size = 0;;) {
    const ssize_t count = ::read(file.get(), bytes.data() + size, bytes.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot read {}: {}", path.string(), reason(errno));
    size += static_cast<size_t>(count);
    if (count == 0) {
      bytes.resize(size);
      return bytes;
    }
    if (size == bytes.size()) bytes.resize(2 * size);
  }
}

void write_file_atomically(const fs::path& path, std::string_view bytes) { write_file_atomically(path, std::span(&bytes, 1)); }

void write_file_atomically(const fs::path& path, std::span<const std::string_view> pieces) {
  std::error_code error;
  const fs::path target = fs::is_symlink(path, error) ? fs::weakly_canonical(path, error) : path;
  if (fs::exists(target, error) && !fs::is_regular_file(target, error)) fail("cannot write {}: it exists and is not a regular file", path.string());
  create_folders(parent_of(target));
  remove_stale_temporaries(target);
  const fs::path temporary = temporary_beside(target);
  try {
    write_pieces(temporary, pieces);
    fs::rename(temporary, target);
  } catch (const std::system_error& problem) {
    fs::remove(temporary, error);
    fail("cannot write {}: {}; what was there before is unchanged", path.string(), problem.code().message());
  }
  sync(parent_of(target));
}

void create_folder_atomically(const fs::path& path, const std::function<void(const fs::path&)>& fill) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(path, error))) fail("cannot create the folder {}: it exists already", path.string());
  create_folders(parent_of(path));
  remove_stale_temporaries(path);
  const fs::path temporary = temporary_beside(path);
  try {
    if (!fs::create_directory(temporary, error)) fail("cannot create the folder {}: {}", path.string(), error.message());
    fill(temporary);
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(temporary)) {
      if (entry.is_regular_file() || entry.is_directory()) sync(entry.path());
    }
    sync(temporary);
    fs::rename(temporary, path);
  } catch (const fs::filesystem_error& problem) {
    fs::remove_all(temporary, error);
    fail("cannot create the folder {}: {}", path.string(), problem.code().message());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
  sync(parent_of(path));
}

uint64_t hash_bytes(std::string_view bytes, uint64_t seed) {
  static_assert(std::endian::native == std::endian::little);
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;
  uint64_t hash = (seed ^ bytes.size()) * kMultiplier + 1;
  // Every step is a bijection of the hash for a given word and of the word for a given hash, so one changed word always shows.
  const auto absorb = [&hash](uint64_t word) {
    hash = (hash ^ word) * kMultiplier;
    hash ^= hash >> 32;
  };
  for (; !bytes.empty(); bytes.remove_prefix(std::min<size_t>(8, bytes.size()))) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), std::min<size_t>(8, bytes.size()));
    absorb(word);
  }
  absorb(0);
  return hash;
}

}  // namespace pathattn
