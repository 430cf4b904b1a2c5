// The program `pathattn`: parses the command line, runs one command, and is the one place where errors are caught.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/nearest_name.h"
#include "base/say.h"
#include "cli/commands.h"
#include "train/version.h"

namespace pathattn {
namespace {

constexpr int kUsersMistake = 2, kFailure = 1;

int report(std::string_view message, int status) {
  say("pathattn: {}\n", message.substr(0, message.find('\n')));
  return status;
}

// A file would get the number of a stream that the caller has closed, and then what is said there. Written to, this is an error as a closed one is.
void occupy_closed_streams() {
  int number = 0;
  while (number >= 0 && number <= STDERR_FILENO) number = ::open("/dev/null", O_RDONLY);
  if (number >= 0) ::close(number);
}

// Threads that wait for each other spin by default, which makes training several times slower as soon as anything else uses a core. libgomp has read
// its environment before main begins, so the program replaces itself once, under its own name; what it starts (a sweep's runs) inherits the setting.
void wait_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (::setenv("OMP_WAIT_POLICY", "passive", 1) == 0 && !error) ::execv(program.c_str(), argv);  // returns only if it failed: go on, but slower
}

// torch would count physical cores only, and none of it knows taskset.
void use_all_cores() {
  cpu_set_t cores;
  if (std::getenv("OMP_NUM_THREADS") == nullptr && sched_getaffinity(0, sizeof cores, &cores) == 0) at::set_num_threads(CPU_COUNT(&cores));
}

// An option that nothing knows explains more than what the parser says first, which may follow from it: after `--outptu x`, "--output is required".
void refuse_unknown_options(const CLI::App& app) {
  std::vector<const CLI::App*> parsed = {&app};
  for (const CLI::App* command : app.get_subcommands()) parsed.push_back(command);
  std::vector<std::string> known;
  for (const CLI::App* part : parsed) {
    for (const CLI::Option* option : part->get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
  }
  for (const std::string& argument : app.remaining(/*recurse=*/true)) {
    if (!argument.starts_with('-')) continue;
    const std::string option = argument.substr(0, argument.find('='));
    const auto nearest = nearest_name(option, known);
    fail("there is no option {}; {}", option, nearest ? fmt::format("did you mean {}?", *nearest) : "see --help");
  }
}

int run(int argc, char** argv) {
  CLI::App app("Transformers with PaTH attention: train, evaluate, generate.", "pathattn");
  app.set_version_flag("--version", fmt::format("pathattn {} (commit {}, torch {})", version(), commit(), torch_version()));
  app.add_option_function<int>(
         "--threads", [](int threads) { at::set_num_threads(threads); }, "CPU threads (default: all cores, or OMP_NUM_THREADS)")
      ->check(CLI::Range(1, 1024));
  app.require_subcommand(1);
  app.fallthrough();
  app.footer("`pathattn COMMAND --help` shows a command's options and examples.");
  add_train_command(app);
  add_evaluate_command(app);
  add_generate_command(app);
  add_logits_command(app);
  add_construct_command(app);
  add_sweep_command(app);
  use_all_cores();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::RuntimeError& status) {
    return status.get_exit_code();
  } catch (const CLI::ParseError& error) {
    refuse_unknown_options(app);
    if (app.get_subcommands().empty() && !app.remaining().empty()) {
      return report(fmt::format("there is no command {}; see --help", app.remaining().front()), kUsersMistake);
    }
    return report(std::string(error.what()) + "; see --help", kUsersMistake);
  }
  return 0;
}

}  // namespace
}  // namespace pathattn

int main(int argc, char** argv) {
  using namespace pathattn;
  occupy_closed_streams();
  wait_without_spinning(argv);
  std::signal(SIGXFSZ, SIG_IGN);  // a file grown past the shell's limit is then a write error like a full disk
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    return report(error.what(), kUsersMistake);
  } catch (const c10::Error& error) {
    return report(error.what_without_backtrace(), kFailure);
  } catch (const std::bad_alloc&) {
    return report("out of memory: use a smaller batch or model", kFailure);
  } catch (const std::exception& error) {
    return report(error.what(), kFailure);
  }
}
