#include <mutex>
#include <utility>

#include <kvferry/transports/shm/channel.hpp>
#include <kvferry/transports/shm/item.hpp>
#include <kvferry/transports/shm/shared_copy.hpp>

namespace kvferry::shm {
namespace {

/// Small enough that the last one to finish is not long after the others, large enough that taking one costs
/// nothing beside copying it.
constexpr std::uint64_t share_bytes = 64 << 10;
constexpr std::uint32_t share_slices = 64;

}  // namespace

std::uint64_t SharedCopy::copy_share() noexcept {
  const Item* item = nullptr;
  SliceRange share;
  {
    const std::lock_guard hold(lock_);
    if (left_.bytes == 0) return 0;
    item = item_;
    share = take_front(left_, share_slices, share_bytes);
    ++inside_;
  }
  const std::uint64_t bytes = share.bytes;
  Status status = item->channel->copy_share(*item, share);
  const std::lock_guard hold(lock_);
  --inside_;
  if (status) return bytes;
  left_.bytes = 0;
  if (result_) std::swap(result_, status);
  return bytes;
}

void SharedCopy::open(Item& item) noexcept {
  const std::lock_guard hold(lock_);
  item_ = &item;
  left_ = item.work.slices;
  result_ = {};
}

void SharedCopy::stop(Status why) {
  const std::lock_guard hold(lock_);
  if (left_.bytes == 0) return;
  left_.bytes = 0;
  if (result_) std::swap(result_, why);
}

bool SharedCopy::given_out() noexcept {
  const std::lock_guard hold(lock_);
  return left_.bytes == 0;
}

bool SharedCopy::none_inside() noexcept {
  const std::lock_guard hold(lock_);
  return inside_ == 0;
}

Status SharedCopy::close() noexcept {
  const std::lock_guard hold(lock_);
  item_ = nullptr;
  return std::exchange(result_, Status());
}

}  // namespace kvferry::shm
