// A command as a child process that writes into a log and ends with this program, however that ends.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace pathattn {

class ChildProcess {
 public:
  // command[0] is the program's path. Standard output and error are appended to `log`; standard input is empty. The child has a process group of its
  // own, so that Ctrl-C on a terminal reaches this program alone. Error if it cannot be started.
  ChildProcess(std::vector<std::string> command, const std::filesystem::path& log);
  ~ChildProcess();  // kills it if it still runs
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void interrupt();             // SIGTERM: trainings save a checkpoint first
  std::optional<int> status();  // nothing while it runs; then its exit status, or 128 and the signal that ended it

 private:
  pid_t process_ = -1;
  std::optional<int> status_;
};

}  // namespace pathattn
