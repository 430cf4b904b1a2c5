// How a CPU kernel hands out its tasks. The caller brings the threads (operators: at::parallel_for; tests: a loop or std::thread).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace pathattn {

template <typename Signature>
class FunctionRef;

// A non-owning reference to a callable, valid during the call that receives it.
template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <typename Callable, typename = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, FunctionRef>>>
  FunctionRef(Callable&& callable)
      : object_(const_cast<void*>(static_cast<const void*>(&callable))), call_([](void* object, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(std::forward<Arguments>(arguments)...);
        }) {}
  Result operator()(Arguments... arguments) const { return call_(object_, std::forward<Arguments>(arguments)...); }

 private:
  void* object_;
  Result (*call_)(void*, Arguments...);
};

struct Executor {
  using Task = FunctionRef<void(int64_t task, int worker)>;
  int num_workers;  // tasks are called with worker in [0, num_workers), never two at once with the same worker
  FunctionRef<void(int64_t num_tasks, Task task)> parallel_for;
};

}  // namespace pathattn
