#include <cstdint>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include <kvferry/actors/submissions.hpp>

namespace kvferry {
namespace {

// Head of a closed queue: never dereferenced.
// NOLINTNEXTLINE(performance-no-int-to-ptr)
TransferState* closed_mark() noexcept { return reinterpret_cast<TransferState*>(std::uintptr_t{1}); }

}  // namespace

Submissions::Submissions(std::function<void(std::function<void()>)> offload)
    : wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), offload_(std::move(offload)) {}

Submissions::~Submissions() {
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

bool Submissions::push(RefPtr<TransferState> transfer) {
  TransferState* raw = transfer.get();
  // Mostly it is empty. To look first would fetch the line twice: to read it and then to write it.
  TransferState* head = nullptr;
  do {
    if (head == closed_mark()) return false;
    raw->next = head;
  } while (!head_.compare_exchange_weak(head, raw, std::memory_order_seq_cst, std::memory_order_relaxed));
  static_cast<void>(transfer.release());
  ring();
  return true;
}

void Submissions::cancel(TransferState& transfer) {
  {
    const std::lock_guard lock(cancelled_mutex_);
    cancelled_.emplace_back(&transfer);
    has_cancelled_.store(true);
  }
  ring();
}

void Submissions::offload(std::function<void()> task) { offload_(std::move(task)); }

void Submissions::ring() noexcept {
  // A relaxed look first: a poller that is awake costs its callers nothing.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed) && asleep_.exchange(false)) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_fd_, &one, sizeof one);
  }
}

TransferState* Submissions::take() noexcept {
  // As in push(): an exchange alone fetches the line once.
  return closed_ ? nullptr : reversed(head_.exchange(nullptr, std::memory_order_acquire));
}

std::vector<RefPtr<TransferState>> Submissions::take_cancelled() {
  if (!has_cancelled_.load(std::memory_order_relaxed)) return {};
  const std::lock_guard lock(cancelled_mutex_);
  has_cancelled_.store(false);
  return std::exchange(cancelled_, {});
}

void Submissions::begin_sleep() noexcept {
  asleep_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Submissions::end_sleep() noexcept {
  asleep_.store(false, std::memory_order_relaxed);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(wake_fd_, &count, sizeof count);
}

TransferState* Submissions::close() noexcept {
  if (std::exchange(closed_, true)) return nullptr;
  return reversed(head_.exchange(closed_mark(), std::memory_order_seq_cst));
}

TransferState* Submissions::reversed(TransferState* newest) noexcept {
  TransferState* oldest = nullptr;
  while (newest) {
    newest->prefetch();
    TransferState* older = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = older;
  }
  return oldest;
}

void SharedOwner::cancel(TransferState& transfer) {
  for (const auto& group : groups_) group->cancel(transfer);
}

}  // namespace kvferry
