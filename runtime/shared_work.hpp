// Work in which a thread that waits for its end can take part.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include <kvferry/runtime/ref_counted.hpp>
#include <kvferry/runtime/spin_lock.hpp>

namespace kvferry {

/// A piece of work that several threads can do at once, share by share.
class SharedWork {
 public:
  /// Does one share, some tens of microseconds at most. False: there is none (left). Any thread.
  virtual bool take_part() noexcept = 0;

  void ref() noexcept { refs_.fetch_add(1, std::memory_order_relaxed); }
  void unref() noexcept {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  SharedWork() = default;
  virtual ~SharedWork() = default;
  SharedWork(const SharedWork&) = delete;
  SharedWork& operator=(const SharedWork&) = delete;

 private:
  std::atomic<std::uint32_t> refs_{1};
};

/// Where whoever carries a transfer out offers such work to the transfer's waiters: the latest offer counts.
class WorkOffer {
 public:
  /// Carrier: makes or replaces the offer.
  void make(RefPtr<SharedWork> work) noexcept {
    const std::lock_guard hold(lock_);
    std::swap(work_, work);
    open_.store(true, std::memory_order_release);
  }
  /// Carrier: takes the offer back if it still is this one.
  void withdraw(const SharedWork* work) noexcept {
    RefPtr<SharedWork> last;
    const std::lock_guard hold(lock_);
    if (work_.get() != work) return;
    std::swap(work_, last);
    open_.store(false, std::memory_order_release);
  }
  /// Waiter: does a share of what is offered. False: nothing was to do. Cheap while there is no offer.
  bool take_part() noexcept {
    if (!open_.load(std::memory_order_acquire)) return false;
    const RefPtr<SharedWork> work = offered();
    return work && work->take_part();
  }

 private:
  RefPtr<SharedWork> offered() noexcept {
    const std::lock_guard hold(lock_);
    return work_;
  }

  std::atomic<bool> open_{false};
  SpinLock lock_;
  RefPtr<SharedWork> work_;
};

}  // namespace kvferry
