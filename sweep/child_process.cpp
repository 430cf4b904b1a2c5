#include "sweep/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <system_error>

#include "base/error.h"

namespace pathattn {
namespace {

constexpr int kCannotStart = 127;

// Between fork and exec, where other threads' locks may be held: system calls alone.
[[noreturn]] void become(char* const* arguments, int log, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // not SIGTERM: an orphan that takes its time to save would still hold its run when the sweep is started again
  if (::getppid() != parent) ::_exit(kCannotStart);
  ::setpgid(0, 0);
  for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);
  const int nothing = ::open("/dev/null", O_RDONLY);
  if (nothing < 0 || ::dup2(nothing, STDIN_FILENO) < 0 || ::dup2(log, STDOUT_FILENO) < 0 || ::dup2(log, STDERR_FILENO) < 0) ::_exit(kCannotStart);
  ::execv(arguments[0], arguments);
  ::_exit(kCannotStart);
}

}  // namespace

ChildProcess::ChildProcess(std::vector<std::string> command, const std::filesystem::path& log) {
  std::vector<char*> arguments;
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  const int file = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) fail("cannot open {} for writing: {}", log.string(), std::generic_category().message(errno));
  const pid_t parent = ::getpid();
  process_ = ::fork();
  if (process_ == 0) become(arguments.data(), file, parent);
  const int error = errno;
  ::close(file);
  if (process_ < 0) fail("cannot start {}: {}", command[0], std::generic_category().message(error));
}

ChildProcess::~ChildProcess() {
  if (status()) return;
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

void ChildProcess::interrupt() {
  if (!status()) ::kill(process_, SIGTERM);
}

std::optional<int> ChildProcess::status() {
  int state = 0;
  if (!status_ && ::waitpid(process_, &state, WNOHANG) == process_) status_ = WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state);
  return status_;
}

}  // namespace pathattn
