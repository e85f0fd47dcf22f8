#include <algorithm>
#include <cstring>
#include <utility>

#include <kvferry/actors/inbox.hpp>

namespace kvferry {

bool SequenceWindow::seen(std::uint64_t sequence) const noexcept {
  if (sequence > highest_) return false;
  return highest_ - sequence >= width || marks_[sequence % width];
}

void SequenceWindow::mark(std::uint64_t sequence) noexcept {
  if (sequence > highest_) {
    const std::uint64_t steps = std::min(sequence - highest_, width);
    for (std::uint64_t i = 1; i <= steps; ++i) marks_.reset((sequence - steps + i) % width);
    highest_ = sequence;
  }
  marks_.set(sequence % width);
}

bool MessageBox::offer(std::uint64_t sequence, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  if (sequence <= last_sequence_) return true;
  if (messages_.size() >= capacity) return false;
  messages_.emplace_back(bytes.begin(), bytes.end());
  last_sequence_ = sequence;
  count_.store(messages_.size(), std::memory_order_release);
  return true;
}

std::optional<std::size_t> MessageBox::take(std::span<std::byte> buffer) {
  const std::lock_guard lock(mutex_);
  if (messages_.empty()) return std::nullopt;
  const auto& message = messages_.front();
  const std::size_t size = message.size();
  if (size > buffer.size()) return size;
  if (size > 0) std::memcpy(buffer.data(), message.data(), size);
  messages_.pop_front();
  count_.store(messages_.size(), std::memory_order_release);
  return size;
}

bool NotificationQueue::push(Notification notification) {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= capacity) return false;
    queue_.push_back(std::move(notification));
  }
  arrived_.notify_one();
  return true;
}

std::optional<Notification> NotificationQueue::pop(Duration limit) {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, std::min<Duration>(limit, longest_wait), [&] { return closed_ || !queue_.empty(); });
  if (queue_.empty()) return std::nullopt;
  Notification first = std::move(queue_.front());
  queue_.pop_front();
  return first;
}

void NotificationQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  arrived_.notify_all();
}

}  // namespace kvferry
