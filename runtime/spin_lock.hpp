// A lock for a few instructions at a time, where a sleeping lock's system calls would cost more than the work.
#pragma once

#include <atomic>

#include <sched.h>

namespace kvferry {

/// Meets BasicLockable. Never hold it over a system call, an allocation or a copy.
class SpinLock {
 public:
  void lock() noexcept {
    for (int tries = 1; locked_.exchange(true, std::memory_order_acquire); ++tries) {
      // The holder may have lost its core to this very thread.
      if (tries % tries_per_yield == 0)
        ::sched_yield();
      else
        pause_core();
    }
  }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

  /// What a spinning thread does between two looks.
  static void pause_core() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int tries_per_yield = 64;
  std::atomic<bool> locked_{false};
};

}  // namespace kvferry
