// What a peer has sent and nobody has taken yet: messages per peer, notifications per engine.
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <kvferry/actors/engine.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

/// Waits are cut to this, since the sum of now and the longest Duration overflows.
inline constexpr Duration longest_wait = std::chrono::hours(24 * 365);

/// Remembers which of the latest sequence numbers were seen, so that a retry on another rail is
/// applied once. Numbers may arrive in any order within the window.
class SequenceWindow {
 public:
  static constexpr std::uint64_t width = 4096;

  bool seen(std::uint64_t sequence) const noexcept;
  void mark(std::uint64_t sequence) noexcept;

 private:
  std::uint64_t highest_ = 0;
  std::bitset<width> marks_;
};

/// One peer's messages, in order, bounded. Thread-safe.
class MessageBox {
 public:
  static constexpr std::size_t capacity = 64;

  /// True when the message is kept or was kept before; false when the box is full.
  bool offer(std::uint64_t sequence, std::span<const std::byte> bytes);
  bool empty() const noexcept { return count_.load(std::memory_order_acquire) == 0; }
  /// Copies the oldest message into `buffer` and removes it; returns its size. A message that does
  /// not fit stays, and only its size is returned.
  std::optional<std::size_t> take(std::span<std::byte> buffer);

 private:
  std::mutex mutex_;
  std::deque<std::vector<std::byte>> messages_;
  std::uint64_t last_sequence_ = 0;
  std::atomic<std::size_t> count_{0};
};

/// All notifications of an engine, bounded. Thread-safe.
class NotificationQueue {
 public:
  static constexpr std::size_t capacity = 65536;

  bool push(Notification notification);
  std::optional<Notification> pop(Duration limit);
  /// Ends all waits.
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Notification> queue_;
  bool closed_ = false;
};

}  // namespace kvferry
