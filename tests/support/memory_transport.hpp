// A transport between engines of one process, under the test's control: no sockets, no threads, no
// time. Engines find each other through a process-wide registry of port addresses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <kvferry/transports/transport.hpp>

namespace kvferry::test {

/// What a test decides and sees. Any thread, at any moment; holds from the ports' next poll on.
struct MemoryControl {
  /// While true, items that were taken wait; release(n) lets n of them go, whichever port polls first.
  std::atomic<bool> hold{false};
  std::atomic<std::uint32_t> released{0};
  std::atomic<bool> reachable{true};              ///< what Transport::reaches answers
  std::atomic<std::uint32_t> fail_registers{0};   ///< the next n register_region calls fail
  std::atomic<std::uint32_t> refuse_releases{0};  ///< the next n release_region calls without force say "in use"
  // ---- what was seen
  std::atomic<int> regions{0};  ///< registered now
  std::atomic<int> ports{0};    ///< open now
  std::atomic<std::uint64_t> items_done{0};

  /// Lets `count` held items go. Ports notice when they poll; a sleeping one by next_wakeup, in 1 ms.
  void release(std::uint32_t count) { released.fetch_add(count); }
};

struct MemoryOptions {
  std::string name = "memory";
  PortLimits limits = {};
  std::shared_ptr<MemoryControl> control = std::make_shared<MemoryControl>();
};

/// Moves bytes when the initiator's port is polled, under one process-wide lock, so a fence or a
/// port's end quietens at once. The target's engine must poll to authorize channels and to take
/// notifications and messages.
std::shared_ptr<Transport> make_memory_transport(MemoryOptions options = {});

}  // namespace kvferry::test
