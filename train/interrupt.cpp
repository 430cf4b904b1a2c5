#include "train/interrupt.h"

#include <csignal>
#include <initializer_list>

namespace pathattn {
namespace {

volatile std::sig_atomic_t pending_signal = 0;

void set_action(void (*action)(int)) {
  struct sigaction settings = {};
  settings.sa_handler = action;
  settings.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);  // reset: the second signal meets the default action, which ends the process
  for (int signal : {SIGINT, SIGTERM}) sigaction(signal, &settings, nullptr);
}

}  // namespace

Interrupt::Interrupt() {
  pending_signal = 0;
  set_action([](int signal) { pending_signal = signal; });
}

Interrupt::~Interrupt() { set_action(SIG_DFL); }

int Interrupt::signal() const { return pending_signal; }

}  // namespace pathattn
