#include "base/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/say.h"

namespace pathattn {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr double kSecondsBetweenBars = 0.1;
constexpr double kSecondsBetweenLines = 5;
constexpr int kBarWidth = 10;         // rate, time left and loss then fit into 80 columns
constexpr double kWholeRate = 999.5;  // from here on three digits would be written with an exponent

bool is_terminal() {
  const char* kind = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) && kind != nullptr && std::string_view(kind) != "dumb";
}

size_t terminal_width() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string clock(double seconds) {
  const auto whole = static_cast<int64_t>(std::min(seconds, 1e9) + 0.5);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(std::string label, int64_t total, std::string unit, int64_t first)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      total_(total),
      first_(first),
      done_(first),
      terminal_(is_terminal()),
      start_(std::chrono::steady_clock::now()),
      printed_(start_) {
  if (terminal_) print(false);
}

Progress::~Progress() {
  try {
    print(true);
  } catch (...) {  // out of memory while another exception is on its way: nothing to add to that one
  }
}

void Progress::update(int64_t done, const std::string& detail) {
  done_ = done;
  detail_ = detail;
  const Seconds since_print = std::chrono::steady_clock::now() - printed_;
  if (since_print.count() >= (terminal_ ? kSecondsBetweenBars : kSecondsBetweenLines)) print(false);
}

void Progress::print(bool last) {
  printed_ = std::chrono::steady_clock::now();
  const double elapsed = Seconds(printed_ - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done_ - first_) / elapsed : 0;
  const std::string count = fmt::format("{}/{} {}", done_, total_, unit_), detail = detail_.empty() ? "" : fmt::format("  {}", detail_);
  std::string speed, time;
  if (rate > 0) speed = rate < kWholeRate ? fmt::format("  {:.3g} {}/s", rate, unit_) : fmt::format("  {:.0f} {}/s", rate, unit_);
  if (last) {
    time = fmt::format("  in {}", clock(elapsed));
  } else if (rate > 0 && total_ >= done_) {
    time = fmt::format("  {} left", clock(static_cast<double>(total_ - done_) / rate));
  }

  if (!terminal_) {
    say("{}: {}{}{}{}\n", label_, count, speed, time, detail);
    return;
  }
  const double share = total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 0;
  const int filled = static_cast<int>(share * kBarWidth);
  const std::string bar = fmt::format("{} [{:#<{}}{:.<{}}] {:3.0f}%", label_, "", filled, "", kBarWidth - filled, 100 * share);
  const size_t width = terminal_width() - 1;  // a line that wraps could not be overwritten
  std::string line;
  for (const std::string& middle : {speed + time, time, std::string()}) {  // the detail is worth more than either
    line = fmt::format("{}  {}{}{}", bar, count, middle, detail);
    if (line.size() <= width || detail.empty()) break;
  }
  line.resize(std::min(line.size(), width));
  say("\r{}\x1b[K{}", line, last ? "\n" : "");
}

}  // namespace pathattn
