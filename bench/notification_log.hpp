// What a target received by write_imm, one peer at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <kvferry/actors/engine.hpp>

namespace kvferry::bench {

/// Takes every notification from the engine on a thread of its own and checks that each peer's
/// immediates count up from 0.
class NotificationLog {
 public:
  explicit NotificationLog(Engine& engine);
  ~NotificationLog();

  void reset(const std::string& peer);
  /// Waits a few seconds for the last ones; empty when exactly 0 .. count - 1 came, in order.
  std::string check(const std::string& peer, std::uint64_t count);

 private:
  struct Seen {
    std::uint64_t count = 0;
    std::string first_error;
  };

  void run();
  Seen seen(const std::string& peer);

  Engine& engine_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::map<std::string, Seen> peers_;
  std::thread thread_;
};

}  // namespace kvferry::bench
