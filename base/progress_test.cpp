#include "base/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <regex>
#include <string>
#include <thread>

namespace pathattn {
namespace {

// What `action` writes to stderr while stderr is `write_end`; the other end is read in a thread, so that no writer waits.
std::string written_to(int read_end, int write_end, const std::function<void()>& action) {
  const int saved = ::dup(STDERR_FILENO);
  ::dup2(write_end, STDERR_FILENO);
  ::close(write_end);
  std::string text;
  std::thread reader([&] {
    char bytes[4096];
    for (ssize_t count; (count = ::read(read_end, bytes, sizeof bytes)) > 0;) text.append(bytes, static_cast<size_t>(count));
  });
  action();
  ::dup2(saved, STDERR_FILENO);  // closes the last write end
  ::close(saved);
  reader.join();
  ::close(read_end);
  return text;
}

std::string piped(const std::function<void()>& action) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  return written_to(ends[0], ends[1], action);
}

std::string on_terminal(const std::function<void()>& action, unsigned short columns) {
  ::setenv("TERM", "xterm", 1);
  const int controller = ::posix_openpt(O_RDWR | O_NOCTTY);
  EXPECT_EQ(::grantpt(controller), 0);
  EXPECT_EQ(::unlockpt(controller), 0);
  const int terminal = ::open(::ptsname(controller), O_RDWR | O_NOCTTY);
  const winsize size{24, columns, 0, 0};
  ::ioctl(terminal, TIOCSWINSZ, &size);
  return written_to(controller, terminal, action);
}

TEST(Progress, piped_gives_few_plain_lines) {
  const std::string text = piped([] {
    Progress progress("training", 1000, "steps", 500);
    for (int step = 501; step <= 1000; ++step) progress.update(step, "loss 1.25");
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_EQ(text.find_first_of("\r\x1b"), std::string::npos);
  EXPECT_NE(text.find("training: 1000/1000 steps"), std::string::npos) << text;
  EXPECT_NE(text.find("loss 1.25"), std::string::npos);
}

TEST(Progress, terminal_shows_bar_rate_and_time_left) {
  const std::string text = on_terminal(
      [] {
        Progress progress("training", 100, "steps", 20);
        ::usleep(150'000);
        progress.update(50, "loss 1.25");
        ::usleep(150'000);
        progress.update(60, "loss 1.20");
      },
      80);
  EXPECT_NE(text.find("\rtraining [#####.....]  50%  50/100 steps"), std::string::npos) << text;
  EXPECT_TRUE(std::regex_search(text, std::regex("[0-9.e+]+ steps/s  [0-9]+:[0-9][0-9] left  loss 1.25"))) << text;
  EXPECT_TRUE(std::regex_search(text, std::regex("60/100 steps .* in [0-9]+:[0-9][0-9]  loss 1.20"))) << text;
  EXPECT_EQ(text.back(), '\n');
}

TEST(Progress, terminal_line_never_wraps) {
  const std::string text = on_terminal(
      [] {
        Progress progress("a label that alone is rather long for such a terminal", 100, "steps");
        progress.update(100, std::string(200, 'x'));
      },
      40);
  size_t length = 0;
  for (const char letter : text) {
    length = letter == '\r' || letter == '\n' ? 0 : length + 1;
    EXPECT_LE(length, 39u + 3) << text;  // 3: the sequence that clears the rest
  }
}

TEST(Progress, terminal_shows_the_detail_before_rate_and_time) {
  const auto last_line = [](unsigned short columns) {
    const std::string text = on_terminal(
        [] {
          Progress progress("evaluating", 100'000, "reads");
          ::usleep(20'000);
          progress.update(100'000, "error 46.98 %");
        },
        columns);
    return text.substr(text.rfind('\r', text.size() - 3));
  };
  EXPECT_TRUE(std::regex_search(last_line(100), std::regex("100000/100000 reads  [0-9]{4,} reads/s  in 0:0[0-9]  error 46.98 %"))) << last_line(100);
  EXPECT_TRUE(std::regex_search(last_line(76), std::regex("100000/100000 reads  in 0:0[0-9]  error 46.98 %"))) << last_line(76);
  EXPECT_TRUE(std::regex_search(last_line(66), std::regex("100000/100000 reads  error 46.98 %"))) << last_line(66);
}

TEST(Progress, odd_totals) {
  const std::string text = piped([] {
    Progress none("empty", 0, "files");
    Progress past("late", 10, "files");
    past.update(11);
  });
  EXPECT_NE(text.find("empty: 0/0 files"), std::string::npos) << text;
  EXPECT_NE(text.find("late: 11/10 files"), std::string::npos) << text;
  EXPECT_EQ(text.find("nan"), std::string::npos);
}

}  // namespace
}  // namespace pathattn
