// The way into a poller: a lock-free queue of transfers and a doorbell that wakes it when it sleeps.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <kvferry/runtime/transfer_state.hpp>

namespace kvferry {

/// Many callers push, one poller takes. Unbounded: the transfers themselves are the nodes.
class Submissions final : public TransferOwner {
 public:
  /// `offload` runs user callbacks; it must stay callable as long as transfers exist.
  explicit Submissions(std::function<void(std::function<void()>)> offload);
  ~Submissions() override;
  Submissions(const Submissions&) = delete;
  Submissions& operator=(const Submissions&) = delete;

  // ---- callers
  /// False when the poller has stopped: the transfer was not taken.
  bool push(RefPtr<TransferState> transfer);
  void cancel(TransferState& transfer) override;
  void offload(std::function<void()> task) override;
  void ring() noexcept;

  // ---- the poller
  /// Everything pushed since the last call, oldest first, as a list through TransferState::next;
  /// each element carries one reference.
  TransferState* take() noexcept;
  std::vector<RefPtr<TransferState>> take_cancelled();
  bool empty() const noexcept { return head_.load(std::memory_order_seq_cst) == nullptr && !has_cancelled_.load(); }
  /// Announces that the poller is about to sleep; it must look at empty() once more afterwards.
  void begin_sleep() noexcept;
  void end_sleep() noexcept;
  int wake_fd() const noexcept { return wake_fd_; }
  /// Refuses every later push; returns what was pushed before.
  TransferState* close() noexcept;

 private:
  static TransferState* reversed(TransferState* newest) noexcept;

  // Its line goes back and forth with every transfer; what is beside it would go along.
  alignas(64) std::atomic<TransferState*> head_{nullptr};
  alignas(64) std::atomic<bool> asleep_{false};
  std::atomic<bool> has_cancelled_{false};
  bool closed_ = false;  ///< the poller's own
  int wake_fd_ = -1;
  std::mutex cancelled_mutex_;
  std::vector<RefPtr<TransferState>> cancelled_;
  std::function<void(std::function<void()>)> offload_;
};

/// Owner of transfers that any of several pollers may carry out: all are told of a cancel, and the one
/// that has the transfer ends it.
class SharedOwner final : public TransferOwner {
 public:
  explicit SharedOwner(std::vector<std::shared_ptr<Submissions>> groups) : groups_(std::move(groups)) {}
  void cancel(TransferState& transfer) override;
  void offload(std::function<void()> task) override { groups_.front()->offload(std::move(task)); }

 private:
  const std::vector<std::shared_ptr<Submissions>> groups_;
};

}  // namespace kvferry
