#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include <fmt/format.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/runtime/transfer_state.hpp>

namespace kvferry {

namespace {

constexpr auto pure_spin = std::chrono::microseconds(5);

// The limit is absolute, so an interrupted or spurious return can simply wait again.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, TimePoint until) noexcept {
  timespec limit{};
  if (until != TimePoint::max()) {
    const auto since_boot = std::max(until.time_since_epoch(), Duration::zero());
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    limit.tv_sec = static_cast<std::time_t>(seconds.count());
    limit.tv_nsec = std::chrono::duration_cast<std::chrono::nanoseconds>(since_boot - seconds).count();
  }
  ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, expected, until == TimePoint::max() ? nullptr : &limit,
            nullptr, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

// Let out on a poller, an exception would end it, and every transfer would stand still. So it is kept in on the
// caller's thread too: which of the two calls is chance.
void call_in_place(const std::function<void(const Status&)>& callback, const Status& status) noexcept {
  try {
    callback(status);
  } catch (const std::exception& e) {
    log(LogLevel::error, fmt::format("a completion callback threw: {}", e.what()));
  } catch (...) {
    log(LogLevel::error, "a completion callback threw");
  }
}

std::uint64_t total_of(std::span<const Slice> slices) noexcept {
  std::uint64_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.length;
  return bytes;
}

}  // namespace

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "the futex is the atomic itself");
static_assert(sizeof(TransferState) % alignof(Slice) == 0, "the slices follow the state without a gap");

RefPtr<TransferState> TransferState::create(Request request) {
  // Not by aligned new: the C library's caches of freed blocks serve the plain one only.
  std::size_t room = sizeof(TransferState) + request.slices.size_bytes() + request.message.size() + line_bytes;
  void* block = ::operator new(room);
  void* place = block;
  auto* state = new (std::align(line_bytes, room - line_bytes, place, room)) TransferState(block);
  auto* slices = reinterpret_cast<Slice*>(state + 1);
  state->op_ = request.op;
  state->priority_ = request.priority;
  state->immediate_ = request.immediate;
  state->message_size_ = static_cast<std::uint32_t>(request.message.size());
  state->deadline_ = request.deadline;
  state->wait_spin_ = request.wait_spin;
  state->wait_yields_ = request.wait_yields;
  state->local_ = std::move(request.local);
  state->remote_ = std::move(request.remote);
  state->owner_ = std::move(request.owner);
  state->slices_ = slices;
  state->slice_count_ = merge_slices(request.slices, slices);
  if (!request.message.empty())
    std::memcpy(static_cast<void*>(slices + state->slice_count_), request.message.data(), request.message.size());
  state->set_bytes(total_of(state->slices()) + request.message.size());
  return RefPtr<TransferState>(state, true);
}

void TransferState::unref() noexcept {
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  void* block = block_;
  this->~TransferState();
  ::operator delete(block);
}

std::span<const std::byte> TransferState::message() const noexcept {
  return {reinterpret_cast<const std::byte*>(slices_ + slice_count_), message_size_};
}

void TransferState::complete(RefPtr<TransferState> transfer, Status status) {
  TransferState& state = *transfer;
  state.status_ = std::move(status);
  std::uint32_t before = watched_word;
  if (state.word_.compare_exchange_strong(before, left_word, std::memory_order_acq_rel)) {
    // From here on the block is the watcher's, and with it this reference.
    static_cast<void>(transfer.release());
    return;
  }
  const auto local = std::move(state.local_);
  const auto remote = std::move(state.remote_);
  std::shared_ptr<TransferOwner> owner;
  std::vector<Callback> callbacks;
  {
    const std::lock_guard lock(state.callbacks_mutex_);
    owner = std::move(state.owner_);
    callbacks.swap(state.callbacks_);
    before = state.word_.exchange(done_word, std::memory_order_acq_rel);
  }
  if (before == waited_word) futex_wake_all(state.word_);
  for (Callback& callback : callbacks) state.run(std::move(callback), owner.get());
}

void TransferState::run(Callback callback, TransferOwner* owner) {
  if (owner == nullptr || callback.where == Dispatch::in_place) {
    call_in_place(callback.function, status_);
    return;
  }
  owner->offload(
      [self = RefPtr<TransferState>(this), function = std::move(callback.function)] { function(self->status_); });
}

bool TransferState::wait_until(TimePoint until, Duration spin) {
  if (done()) return true;
  std::uint32_t seen = running_word;
  const bool watching = word_.compare_exchange_strong(seen, watched_word, std::memory_order_acq_rel);
  look_on(until, spin);
  if (watching) stop_watching();
  while (Clock::now() < until) {
    seen = word_.load(std::memory_order_acquire);
    if (seen >= done_word) return true;
    if (seen == waited_word || word_.compare_exchange_strong(seen, waited_word, std::memory_order_acq_rel))
      futex_wait(word_, waited_word, until);
  }
  return done();
}

/// Spins, taking part in offered work, until done or for as long as `spin` without any.
void TransferState::look_on(TimePoint until, Duration spin) {
  TimePoint start = Clock::now();
  for (TimePoint now = start; now < until && now - start < spin; now = Clock::now()) {
    // Past the first moments another thread may need this core more, perhaps the one waited for.
    if (wait_yields_ && now - start >= pure_spin) ::sched_yield();
    for (int i = 0; i < 16; ++i) {
      if (done()) return;
      SpinLock::pause_core();
    }
    // Where there was something to do, more is likely to come.
    if (work_offer_.take_part()) start = Clock::now();
  }
}

void TransferState::stop_watching() {
  std::uint32_t seen = word_.load(std::memory_order_acquire);
  if (seen == watched_word && word_.compare_exchange_strong(seen, running_word, std::memory_order_acq_rel)) return;
  if (seen == left_word) let_go();
}

/// What the carrier left to the watcher.
void TransferState::let_go() {
  const RefPtr<TransferState> carriers(this, true);
  const auto local = std::move(local_);
  const auto remote = std::move(remote_);
  std::shared_ptr<TransferOwner> owner;
  const std::lock_guard lock(callbacks_mutex_);
  owner = std::move(owner_);
}

void TransferState::on_complete(std::function<void(const Status&)> callback, Dispatch where) {
  // The callback may let go of the last handle.
  const RefPtr<TransferState> self(this);
  {
    const std::lock_guard lock(callbacks_mutex_);
    if (announce_callbacks()) {
      callbacks_.push_back({std::move(callback), where});
      return;
    }
  }
  call_in_place(callback, status_);
}

/// Makes complete() look for callbacks. False: it is too late for that.
bool TransferState::announce_callbacks() {
  std::uint32_t seen = word_.load(std::memory_order_acquire);
  while (seen == running_word || seen == watched_word)
    if (word_.compare_exchange_weak(seen, called_word, std::memory_order_acq_rel)) return true;
  return seen < done_word;
}

void TransferState::cancel() {
  cancel_requested_.store(true, std::memory_order_release);
  std::shared_ptr<TransferOwner> owner;
  {
    const std::lock_guard lock(callbacks_mutex_);
    owner = owner_;
  }
  if (owner) owner->cancel(*this);
}

}  // namespace kvferry
