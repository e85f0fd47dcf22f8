// A transfer large enough for several groups: one part per group, one completion.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include <kvferry/runtime/transfer_state.hpp>

namespace kvferry {

/// Owns the parts of one large transfer; the whole's TransferOwner.
class SplitOwner final : public TransferOwner {
 public:
  explicit SplitOwner(std::shared_ptr<TransferOwner> base) : base_(std::move(base)) {}

  void cancel(TransferState& transfer) override;
  void offload(std::function<void()> task) override { base_->offload(std::move(task)); }

  /// Cuts the whole's slices into `count` runs of about equal bytes.
  static std::vector<std::vector<Slice>> cut(std::span<const Slice> slices, std::size_t count);

  /// Adds a part before any part is submitted.
  void add(RefPtr<TransferState> part);
  /// Completes `whole` when every part added has ended: with ok, or with the first error, after which
  /// the other parts are cancelled.
  static void watch(const std::shared_ptr<SplitOwner>& owner, RefPtr<TransferState> whole);
  bool cancelled() const noexcept { return cancelled_.load(); }
  /// Owner of the parts: one that reaches whichever poller carries them.
  const std::shared_ptr<TransferOwner>& base() const noexcept { return base_; }

 private:
  void part_ended(const RefPtr<TransferState>& whole, const Status& status);

  std::shared_ptr<TransferOwner> base_;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::vector<RefPtr<TransferState>> parts_;
  std::size_t running_ = 0;
  Status first_error_;
};

}  // namespace kvferry
