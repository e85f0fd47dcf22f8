// The state behind a Transfer. Internal: callers hold a Transfer, pollers hold this.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvferry/runtime/ref_counted.hpp>
#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/shared_work.hpp>
#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

/// Whoever carries a transfer out. Outlives the transfers it was given (they share ownership).
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  /// Asks for an early end. Any thread; must not block.
  virtual void cancel(TransferState& transfer) = 0;
  /// Runs `task` where user code may block. Any thread.
  virtual void offload(std::function<void()> task) = 0;
};

/// One transfer: what to do, how far it is, how it ended. Allocated as one block:
///
///     [up to the next cache line][TransferState][merged slices ...][message bytes ...][unused: room for slices that
///     merged away]
///
/// The block is sized before the merge, so that one pass over the slices is enough; in a large block
/// the pages of the unused end are never touched and so cost nothing. Fields without a comment on threads are written
/// before the state is handed to its owner.
class TransferState {
 public:
  /// What a transfer is to do; `slices` are copied (merged) into the block.
  struct Request {
    Op op = Op::read;
    Priority priority = Priority::normal;
    TimePoint deadline{};
    std::shared_ptr<const RegionRecord> local = {};
    std::shared_ptr<const RemoteRegion> remote = {};
    std::span<const Slice> slices = {};
    std::uint32_t immediate = 0;
    std::span<const std::byte> message = {};             ///< send: copied into the block
    std::shared_ptr<TransferOwner> owner = {};           ///< may be empty: then callbacks run in place
    Duration wait_spin = std::chrono::microseconds(20);  ///< how long Transfer::wait looks before it sleeps
    bool wait_yields = true;  ///< whether that look gives way to other threads: the work may need this very core
  };

  /// Throws std::bad_alloc alone.
  static RefPtr<TransferState> create(Request request);

  void ref() noexcept { refs_.fetch_add(1, std::memory_order_relaxed); }
  void unref() noexcept;

  // ---- what to do
  Op op() const noexcept { return op_; }
  Priority priority() const noexcept { return priority_; }
  TimePoint deadline() const noexcept { return deadline_; }
  Duration wait_spin() const noexcept { return wait_spin_; }
  bool wait_yields() const noexcept { return wait_yields_; }
  std::uint32_t immediate() const noexcept { return immediate_; }
  /// The regions belong to whoever carries the transfer out, until complete(), which lets go of them.
  const RegionRecord* local() const noexcept { return local_.get(); }
  const std::shared_ptr<const RegionRecord>& shared_local() const noexcept { return local_; }
  /// Like the regions: only whoever carries the transfer out, before complete().
  const std::shared_ptr<TransferOwner>& owner() const noexcept { return owner_; }
  const std::shared_ptr<const RemoteRegion>& remote() const noexcept { return remote_; }
  /// Slow path: the remote region is known only after the peer was asked.
  void set_remote(std::shared_ptr<const RemoteRegion> remote) { remote_ = std::move(remote); }
  std::span<const Slice> slices() const noexcept { return {slices_, slice_count_}; }
  std::uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }
  void set_bytes(std::uint64_t bytes) noexcept { bytes_.store(bytes, std::memory_order_relaxed); }
  std::span<const std::byte> message() const noexcept;

  /// Where a transport offers waiters a part of the work.
  WorkOffer& work_offer() noexcept { return work_offer_; }

  /// Fetches the block's lines all at once, where looking at them would fetch one after the other.
  void prefetch() const noexcept {
    const auto* block = reinterpret_cast<const std::byte*>(this);
    for (std::size_t line = 0; line <= sizeof(TransferState); line += line_bytes) __builtin_prefetch(block + line);
  }

  // ---- the end
  bool done() const noexcept { return word_.load(std::memory_order_acquire) >= done_word; }
  /// Only once done().
  const Status& status() const noexcept { return status_; }
  /// Ends the transfer, wakes its waiters and runs or offloads its callbacks. Exactly once, by the
  /// thread that carries the transfer out. Lets go of the regions and the owner: a handle that is
  /// kept for long keeps neither alive.
  void complete(Status status) { complete(RefPtr<TransferState>(this), std::move(status)); }
  /// The same for a carrier that gives its reference up. A waiter that is looking on at that moment then lets go
  /// of regions, owner and reference: its core counted them, so the counters' lines need not cross to the
  /// carrier's core and back, which may take as long as all the rest of a small transfer.
  static void complete(RefPtr<TransferState> transfer, Status status);
  /// Spins for up to `spin`, taking part in offered work, then sleeps until done or `until`. True when done.
  bool wait_until(TimePoint until, Duration spin);
  /// Once the transfer has ended the callback runs at once on the calling thread, whatever `where`.
  void on_complete(std::function<void(const Status&)> callback, Dispatch where);
  /// Notes the wish and tells the owner. Any thread.
  void cancel();
  /// Whether cancel() was called: whoever takes the transfer over looks here first, since the call may
  /// have come while nobody had it.
  bool cancel_requested() const noexcept { return cancel_requested_.load(std::memory_order_acquire); }

  /// Link for the submission queue: belongs to whoever holds the transfer in a queue.
  alignas(64) TransferState* next = nullptr;
  /// The poller that carries the transfer out at the moment: it alone may follow owner_data.
  std::atomic<const void*> carrier{nullptr};
  /// The carrier's own bookkeeping.
  void* owner_data = nullptr;
  std::uint64_t sequence = 0;   ///< write_imm and send: number in the peer's notification order
  std::uint32_t peer_slot = 0;  ///< the engine's number of the peer
  std::uint64_t backlog = 0;    ///< bytes counted in its group's backlog
  TimePoint submitted_at{};
  /// recv: where the message goes. Belongs to the caller.
  std::span<std::byte> receive_buffer;

 private:
  struct Callback {
    std::function<void(const Status&)> function;
    Dispatch where;
  };
  static constexpr std::size_t line_bytes = 64;  ///< of the caches: what different cores write lies apart
  // The words of a transfer that runs, ...
  static constexpr std::uint32_t running_word = 0;
  static constexpr std::uint32_t waited_word = 1;   ///< somebody sleeps on the word
  static constexpr std::uint32_t called_word = 2;   ///< callbacks are to be run
  static constexpr std::uint32_t watched_word = 3;  ///< neither, and one thread looks on
  // ... and of one that has ended.
  static constexpr std::uint32_t done_word = 4;
  static constexpr std::uint32_t left_word = 5;  ///< the watcher lets go of regions, owner and one reference

  explicit TransferState(void* block) noexcept : block_(block) {}
  ~TransferState() = default;
  void run(Callback callback, TransferOwner* owner);
  bool announce_callbacks();
  void look_on(TimePoint until, Duration spin);
  void stop_watching();
  void let_go();

  // A line that is looked at in a loop by waiters; what the carrier writes there goes out with the end.
  alignas(line_bytes) std::atomic<std::uint32_t> word_{running_word};
  WorkOffer work_offer_;
  Status status_;
  // Lines that the caller fills and the carrier reads.
  alignas(line_bytes) std::atomic<std::uint32_t> refs_{1};
  Op op_ = Op::read;
  Priority priority_ = Priority::normal;
  bool wait_yields_ = true;
  std::atomic<bool> cancel_requested_{false};
  void* block_;  ///< what was allocated
  std::uint32_t immediate_ = 0;
  std::uint32_t message_size_ = 0;
  std::shared_ptr<const RegionRecord> local_;
  std::shared_ptr<const RemoteRegion> remote_;
  const Slice* slices_ = nullptr;
  std::size_t slice_count_ = 0;
  TimePoint deadline_{};
  Duration wait_spin_{};
  std::atomic<std::uint64_t> bytes_{0};
  std::mutex callbacks_mutex_;            ///< guards the two below and the step to done_word
  std::shared_ptr<TransferOwner> owner_;  ///< empty once done
  std::vector<Callback> callbacks_;
};

}  // namespace kvferry
