// Two processes that tell each other "your turn" through a word of shared memory: the fastest
// signal there is between two cores. Messages lie in two areas behind the words.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>

#include <kvferry/runtime/status.hpp>

#include "bench/shared_memory.hpp"

namespace kvferry::bench {

class ShmPing {
 public:
  /// Memory for two areas of `bytes` each.
  static std::uint64_t memory_bytes(std::uint64_t bytes) noexcept { return sizeof(Words) + 2 * bytes; }

  explicit ShmPing(SharedMemory memory) : memory_(std::move(memory)) {}

  int memfd() const noexcept { return memory_.memfd(); }
  std::span<std::byte> request_area() const noexcept { return areas().first(areas().size() / 2); }
  std::span<std::byte> reply_area() const noexcept { return areas().last(areas().size() / 2); }

  /// Asks and waits for the answer, 10 s at most.
  Status ask() {
    const std::uint32_t turn = words().asked.load(std::memory_order_relaxed) + 1;
    words().asked.store(turn, std::memory_order_release);
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    spins_ = 0;
    while (words().answered.load(std::memory_order_acquire) != turn) {
      if (spin_once()) continue;
      if (std::chrono::steady_clock::now() > give_up) {
        return {Errc::timed_out, "floor: the other side was silent for 10 s"};
      }
      std::this_thread::yield();
    }
    return Status::ok();
  }

  /// Waits for a question; false when `stop` was set first.
  bool await_question(const std::atomic<bool>& stop) {
    const std::uint32_t answered = words().answered.load(std::memory_order_relaxed);
    while (words().asked.load(std::memory_order_acquire) == answered) {
      if (spin_once()) continue;
      if (stop.load(std::memory_order_relaxed)) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    spins_ = 0;
    return true;
  }

  void answer() { words().answered.store(words().asked.load(std::memory_order_relaxed), std::memory_order_release); }

 private:
  struct Words {
    alignas(64) std::atomic<std::uint32_t> asked;
    alignas(64) std::atomic<std::uint32_t> answered;
  };

  /// Long enough for any trip's copies in between, short enough to leave the core to others soon.
  static constexpr std::uint32_t spin_limit = 20'000;

  Words& words() const noexcept { return *reinterpret_cast<Words*>(memory_.bytes().data()); }
  std::span<std::byte> areas() const noexcept { return memory_.bytes().subspan(sizeof(Words)); }

  bool spin_once() noexcept {
    if (spins_ >= spin_limit) {
      spins_ = spin_limit;
      return false;
    }
    ++spins_;
    __builtin_ia32_pause();
    return true;
  }

  SharedMemory memory_;
  std::uint32_t spins_ = 0;
};

}  // namespace kvferry::bench
