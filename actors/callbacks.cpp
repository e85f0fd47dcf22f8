#include <exception>
#include <utility>

#include <fmt/format.h>
#include <sys/prctl.h>

#include <kvferry/actors/callbacks.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {

void CallbackActor::act() {
  ::prctl(PR_SET_NAME, "kvferry-calls");
  bool running = true;
  while (running) {
    receive(
        [](const CallbackTask& task) {
          try {
            task.run();
          } catch (const std::exception& e) {
            log(LogLevel::error, fmt::format("a completion callback threw: {}", e.what()));
          } catch (...) {
            // Let out, it would end this thread, and with it every callback to come.
            log(LogLevel::error, "a completion callback threw");
          }
        },
        [&running](StopCallbacks) { running = false; },
        caf::others >> [](caf::message_view&) -> caf::result<caf::message> { return caf::sec::unexpected_message; });
  }
}

void CallbackRunner::start(caf::actor_system& system) {
  const std::lock_guard lock(mutex_);
  actor_ = system.spawn<CallbackActor, caf::detached>();
}

void CallbackRunner::stop() {
  const std::lock_guard lock(mutex_);
  if (actor_) caf::anon_send(actor_, StopCallbacks{});
  actor_ = nullptr;
}

void CallbackRunner::run(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (actor_) {
      caf::anon_send(actor_, CallbackTask{std::move(task)});
      return;
    }
  }
  task();
}

}  // namespace kvferry
