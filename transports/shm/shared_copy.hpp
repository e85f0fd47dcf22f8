// An item that the poller and the threads that wait for its transfer copy together.
#pragma once

#include <cstdint>

#include <kvferry/runtime/shared_work.hpp>
#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/spin_lock.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry::shm {

struct Item;

/// Each takes the next share of the item's bytes under the lock and copies it outside. The poller ends the
/// item only when none_inside(): until then the channel, its mappings and the item stay as they are.
class SharedCopy final : public SharedWork {
 public:
  /// Any thread: copies one share.
  bool take_part() noexcept override { return copy_share() > 0; }
  /// The same; returns how many bytes, 0 when none are left.
  std::uint64_t copy_share() noexcept;

  // ---- poller
  /// Gives `item`'s bytes out from now on. Nobody may be inside.
  void open(Item& item) noexcept;
  /// Gives no more out; what was not given yet ends with `why`. Without effect once everything was.
  void stop(Status why);
  /// Whether all bytes are given out, or none will be any more.
  bool given_out() noexcept;
  bool none_inside() noexcept;
  /// After given_out() and none_inside(): how the copying ended. Late helpers find nothing from here on.
  Status close() noexcept;

 private:
  SpinLock lock_;
  Item* item_ = nullptr;
  SliceRange left_;  ///< not given out
  std::uint32_t inside_ = 0;
  Status result_;
};

}  // namespace kvferry::shm
