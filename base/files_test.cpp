#include "base/files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>

#include "base/error_of.h"
#include "base/scratch_folder.h"

namespace pathattn {
namespace {

namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder)) found.insert(entry.path().filename().string());
    return found;
  }

  const ScratchFolder scratch;
  const fs::path folder = scratch.path();
};

// Runs `action` in a child process, which then exits with 0 if it threw Error and with 9 if it did not.
int status_in_child(const std::function<void()>& action) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(error_of(action).empty() ? 9 : 0);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

void limit_file_size(rlim_t bytes) {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{bytes, bytes};
  ::setrlimit(RLIMIT_FSIZE, &limit);
}

TEST_F(Files, write_then_read) {
  const fs::path path = folder / "deep" / "er" / "file.bin";
  const std::string bytes("a\0b\n", 4);
  write_file_atomically(path, bytes);
  EXPECT_EQ(read_file(path), bytes);
  write_file_atomically(path, "");
  EXPECT_EQ(read_file(path), "");
  const std::string_view pieces[] = {"one ", "", "two"};
  write_file_atomically(path, pieces);
  EXPECT_EQ(read_file(path), "one two");
  const std::string large(10'000'000, 'x');
  write_file_atomically(path, large);
  EXPECT_EQ(read_file(path), large);
  EXPECT_EQ(std::distance(fs::directory_iterator(path.parent_path()), {}), 1);
}

TEST_F(Files, reading_what_cannot_be_read) {
  EXPECT_EQ(error_of([&] { read_file(folder / "missing"); }), "cannot open " + (folder / "missing").string() + ": No such file or directory");
  EXPECT_NE(error_of([&] { read_file(folder); }).find("it is a folder"), std::string::npos);
}

TEST_F(Files, full_disk_keeps_the_old_content) {
  const fs::path path = folder / "file";
  write_file_atomically(path, "old");
  EXPECT_EQ(status_in_child([&] {
              limit_file_size(1000);
              write_file_atomically(path, std::string(5000, 'n'));
            }),
            0);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names(), std::set<std::string>{"file"});
}

TEST_F(Files, full_disk_leaves_no_folder) {
  const fs::path path = folder / "checkpoint";
  EXPECT_EQ(status_in_child([&] {
              limit_file_size(1000);
              create_folder_atomically(path, [](const fs::path& inside) { write_file_atomically(inside / "weights", std::string(5000, 'n')); });
            }),
            0);
  EXPECT_TRUE(names().empty());
}

TEST_F(Files, folder_without_permission) {
  write_file_atomically(folder / "file", "old");
  fs::permissions(folder, fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_EQ(status_in_child([&] {
              if (::geteuid() == 0 && ::seteuid(65534) != 0) ::_exit(3);  // root may write everywhere
              write_file_atomically(folder / "file", "new");
            }),
            0);
  fs::permissions(folder, fs::perms::owner_all);
  EXPECT_EQ(read_file(folder / "file"), "old");
}

TEST_F(Files, kill_at_random_moments_leaves_a_whole_file) {
  const fs::path path = folder / "file";
  const std::string old_bytes(3'000'000, 'o'), new_bytes(3'000'000, 'n');
  int num_old = 0;
  for (int moment = 0; moment < 40; ++moment) {
    write_file_atomically(path, old_bytes);
    const pid_t child = ::fork();
    if (child == 0) {
      write_file_atomically(path, new_bytes);
      ::_exit(0);
    }
    ::usleep(static_cast<useconds_t>(moment * 150));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::string bytes = read_file(path);
    ASSERT_TRUE(bytes == old_bytes || bytes == new_bytes) << "after " << moment * 150 << " microseconds";
    num_old += bytes == old_bytes;
  }
  EXPECT_GT(num_old, 0);
  write_file_atomically(path, "end");
  EXPECT_EQ(names(), std::set<std::string>{"file"});  // what killed writers left is gone
}

TEST_F(Files, links_are_followed_and_devices_refused) {
  write_file_atomically(folder / "target", "old");
  fs::create_symlink("target", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "target"), "new");
  EXPECT_NE(error_of([] { write_file_atomically("/dev/null", "x"); }).find("not a regular file"), std::string::npos);
  EXPECT_NE(error_of([&] { write_file_atomically(folder, "x"); }).find("not a regular file"), std::string::npos);
  EXPECT_NE(error_of([&] { write_file_atomically(folder / "target" / "x", "x"); }), "");
}

TEST_F(Files, folder_is_whole_or_absent) {
  const fs::path path = folder / "checkpoint";
  EXPECT_THROW(create_folder_atomically(path,
                                        [](const fs::path& inside) {
                                          write_file_atomically(inside / "half", "x");
                                          fail("no more");
                                        }),
               Error);
  EXPECT_TRUE(names().empty());
  create_folder_atomically(path, [](const fs::path& inside) {
    write_file_atomically(inside / "weights", "w");
    write_file_atomically(inside / "more" / "state", "s");
  });
  EXPECT_EQ(read_file(path / "weights"), "w");
  EXPECT_EQ(read_file(path / "more" / "state"), "s");
  EXPECT_NE(error_of([&] { create_folder_atomically(path, [](const fs::path&) {}); }).find("exists already"), std::string::npos);
  EXPECT_EQ(read_file(path / "weights"), "w");
}

TEST_F(Files, killed_folder_is_absent_and_cleaned_up) {
  const fs::path path = folder / "checkpoint";
  const int status = status_in_child([&] {
    create_folder_atomically(path, [](const fs::path& inside) {
      write_file_atomically(inside / "weights", "w");
      ::raise(SIGKILL);
    });
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_FALSE(fs::exists(path));
  EXPECT_EQ(names().size(), 1u);  // the temporary
  create_folder_atomically(path, [](const fs::path& inside) { write_file_atomically(inside / "weights", "new"); });
  EXPECT_EQ(names(), std::set<std::string>{"checkpoint"});
}

TEST(Hash, changes_with_any_byte_and_with_length) {
  std::set<uint64_t> seen;
  for (size_t size = 0; size < 20; ++size) {
    std::string bytes(size, '\0');
    seen.insert(hash_bytes(bytes));
    for (size_t place = 0; place < size; ++place) {
      for (int value = 1; value < 256; ++value) {
        bytes[place] = static_cast<char>(value);
        seen.insert(hash_bytes(bytes));
      }
      bytes[place] = 0;
    }
  }
  EXPECT_EQ(seen.size(), 20u + 255 * 190);
  EXPECT_NE(hash_bytes("x", 1), hash_bytes("x", 2));
  EXPECT_EQ(hash_bytes("pathattn"), 7020331642273573103u);  // recorded once: saved runs carry hashes
}

}  // namespace
}  // namespace pathattn
