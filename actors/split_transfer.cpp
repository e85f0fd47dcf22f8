#include <algorithm>
#include <utility>

#include <kvferry/actors/split_transfer.hpp>

namespace kvferry {

void SplitOwner::cancel(TransferState&) {
  cancelled_.store(true);
  std::vector<RefPtr<TransferState>> parts;
  {
    const std::lock_guard lock(mutex_);
    parts = parts_;
  }
  for (const auto& part : parts) part->cancel();
}

std::vector<std::vector<Slice>> SplitOwner::cut(std::span<const Slice> slices, std::size_t count) {
  std::uint64_t total = 0;
  for (const Slice& slice : slices) total += slice.length;
  const std::uint64_t share = std::max<std::uint64_t>(1, (total + count - 1) / count);
  std::vector<std::vector<Slice>> runs(1);
  std::uint64_t room = share;
  for (Slice slice : slices) {
    while (slice.length > 0) {
      if (room == 0) {
        runs.emplace_back();
        room = share;
      }
      const std::uint64_t piece = std::min(slice.length, room);
      runs.back().push_back({slice.local_offset, slice.remote_offset, piece});
      slice.local_offset += piece;
      slice.remote_offset += piece;
      slice.length -= piece;
      room -= piece;
    }
  }
  return runs;
}

void SplitOwner::add(RefPtr<TransferState> part) {
  const std::lock_guard lock(mutex_);
  parts_.push_back(std::move(part));
  ++running_;
}

void SplitOwner::watch(const std::shared_ptr<SplitOwner>& owner, RefPtr<TransferState> whole) {
  std::vector<RefPtr<TransferState>> parts;
  {
    const std::lock_guard lock(owner->mutex_);
    parts = owner->parts_;
  }
  for (const auto& part : parts)
    part->on_complete([owner, whole](const Status& status) { owner->part_ended(whole, status); }, Dispatch::in_place);
}

void SplitOwner::part_ended(const RefPtr<TransferState>& whole, const Status& status) {
  std::vector<RefPtr<TransferState>> others;
  bool last = false;
  Status outcome;
  {
    const std::lock_guard lock(mutex_);
    if (!status.is_ok() && first_error_.is_ok()) {
      first_error_ = status;
      others = parts_;
    }
    last = --running_ == 0;
    outcome = first_error_;
    if (last) parts_.clear();
  }
  for (const auto& part : others) part->cancel();
  if (last) whole->complete(outcome);
}

}  // namespace kvferry
