// Helper threads that copy the items of large transfers, so that the poller stays free.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <kvferry/transports/shm/fd.hpp>
#include <kvferry/transports/shm/item.hpp>

namespace kvferry::shm {

/// Belongs to one Port. Helpers sleep while there is nothing to copy.
class CopyPool {
 public:
  /// Fails with resource_exhausted when threads or descriptors are used up.
  static Result<std::unique_ptr<CopyPool>> start(int threads);
  /// Ends the helpers after the portions they are in; items not started stay as they are.
  ~CopyPool();

  /// Hands an item over; its fields are the helper's until collect() gives it back.
  void submit(Item* item);
  /// The items that are through (Item::result says how), in a queue.
  ItemQueue collect();
  /// Readable from when an item is through and arm() was called, until quiet_bell().
  int done_fd() const noexcept { return done_fd_.get(); }
  /// Before the poller sleeps: the next item that is through (or is already) rings.
  void arm();
  void quiet_bell();

 private:
  explicit CopyPool(Fd done_fd) : done_fd_(std::move(done_fd)) {}
  void run();
  Item* take();
  void give_back(Item* item);
  void ring_if_armed();

  Fd done_fd_;
  std::atomic<bool> some_done_{false};
  std::atomic<bool> armed_{false};
  std::mutex mutex_;
  std::condition_variable work_or_end_;
  ItemQueue waiting_;
  ItemQueue done_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvferry::shm
