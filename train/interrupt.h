// Ctrl-C and SIGTERM as a wish that work is ended in good order. A second one ends the process at once.
#pragma once

namespace pathattn {

// While an object lives, the first SIGINT or SIGTERM is only noted. One object at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();  // restores the default action
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  int signal() const;  // the signal that came, 0 if none
};

}  // namespace pathattn
