// A transport that wraps another and makes it misbehave on purpose, for tests.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <kvferry/transports/transport.hpp>

namespace kvferry {

/// What goes wrong. Shared between the test and the ports; every field may change at any moment from
/// any thread and holds for items posted (or polls made) from then on.
struct FaultPlan {
  /// Items move their bytes only this much later, as a slow NIC would: fence must still quieten them.
  std::atomic<std::int64_t> delay_us{0};
  /// Completions are reported this much after the bytes have moved.
  std::atomic<std::int64_t> completion_delay_us{0};
  std::atomic<std::uint32_t> refuse_posts{0};   ///< the next n posts take nothing
  std::atomic<std::uint32_t> corrupt_items{0};  ///< the next n reads get one byte flipped on arrival
  /// The next n writes go out with one byte flipped; in the local region it is flipped back at their end.
  std::atomic<std::uint32_t> corrupt_writes{0};
  std::atomic<std::uint32_t> fail_items{0};    ///< the next n items end with channel_error, undone
  std::atomic<bool> rail_down{false};          ///< channels break, open() fails, until cleared
  std::atomic<std::uint32_t> refuse_opens{0};  ///< the next n open() calls fail
  std::atomic<bool> ignore_cancel{false};      ///< cancel has no effect: only fence ends items
  // ---- what was seen
  std::atomic<std::uint64_t> items{0};
  std::atomic<std::uint64_t> fences{0};
  std::atomic<std::uint64_t> cancels{0};
};

/// Wraps `inner`; its name is the inner's with "fault+" before it unless `name` is given.
std::shared_ptr<Transport> make_fault_transport(std::shared_ptr<Transport> inner, std::shared_ptr<FaultPlan> plan,
                                                std::string name = {});

}  // namespace kvferry
