#include "bench/notification_log.hpp"

#include <chrono>

#include <fmt/core.h>

namespace kvferry::bench {

using namespace std::chrono_literals;

NotificationLog::NotificationLog(Engine& engine) : engine_(engine), thread_([this] { run(); }) {}

NotificationLog::~NotificationLog() {
  stop_ = true;
  thread_.join();
}

void NotificationLog::run() {
  while (!stop_) {
    auto notification = engine_.next_notification(200ms);
    if (!notification) {
      if (notification.status() == Errc::timed_out) continue;
      return;
    }
    const std::lock_guard lock(mutex_);
    Seen& seen = peers_[notification->peer];
    const auto expected = static_cast<std::uint32_t>(seen.count++);
    if (notification->immediate != expected && seen.first_error.empty()) {
      seen.first_error = fmt::format("notification {} carried the immediate {}", expected, notification->immediate);
    }
  }
}

void NotificationLog::reset(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  peers_[peer] = {};
}

NotificationLog::Seen NotificationLog::seen(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  return peers_[peer];
}

std::string NotificationLog::check(const std::string& peer, std::uint64_t count) {
  const auto give_up = std::chrono::steady_clock::now() + 5s;
  while (seen(peer).count < count && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(1ms);
  const Seen result = seen(peer);
  if (!result.first_error.empty()) return result.first_error;
  if (result.count == count) return {};
  return fmt::format("{} notifications arrived instead of {}", result.count, count);
}

}  // namespace kvferry::bench
