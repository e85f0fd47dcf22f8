// Hands tasks to one thread. Internal.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

/// Outlives its thread, so that a late completion may still post; what nobody runs any more is dropped.
class TaskQueue {
 public:
  void post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  /// All tasks that are there; waits for one until `until`.
  std::deque<std::function<void()>> take(TimePoint until) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, until, [this] { return !tasks_.empty(); });
    return std::exchange(tasks_, {});
  }

  void close() {
    std::deque<std::function<void()>> dropped;  // destroyed outside the lock
    const std::lock_guard lock(mutex_);
    closed_ = true;
    dropped.swap(tasks_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
};

}  // namespace kvferry
