// Where user callbacks run: a thread of their own, so that a slow one stops no transfer.
#pragma once

#include <functional>
#include <mutex>

#include <kvferry/actors/caf.hpp>

namespace kvferry {

class CallbackActor final : public caf::blocking_actor {
 public:
  using caf::blocking_actor::blocking_actor;
  void act() override;
};

/// The way to the callback actor; usable for as long as anything may complete. Thread-safe.
class CallbackRunner {
 public:
  void start(caf::actor_system& system);
  /// Runs everything handed over so far, then ends the thread.
  void stop();
  /// After stop() the task runs at once on the calling thread.
  void run(std::function<void()> task);

 private:
  std::mutex mutex_;
  caf::actor actor_;
};

}  // namespace kvferry
