// The handle of a transfer: what read() and write() return and callers wait on.
#pragma once

#include <chrono>
#include <coroutine>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>

#include <kvferry/runtime/ref_counted.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

enum class Op : std::uint8_t { read = 0, write = 1, write_imm = 2, send = 3, recv = 4 };
std::string_view to_string(Op op) noexcept;

/// Critical goes before normal, normal before background; inside a class the earliest deadline
/// goes first. Background is aged and never starves.
enum class Priority : std::uint8_t { critical = 0, normal = 1, background = 2 };

/// Where a completion callback runs.
enum class Dispatch : std::uint8_t {
  offload,  ///< on the engine's callback thread: may block
  in_place  ///< on the thread that completes the transfer: must be short and never block
};

struct TransferOptions {
  /// Time from submission to a forced end. Zero: the engine's default (30 s).
  Duration deadline{0};
  Priority priority = Priority::normal;
};

class TransferState;

/// A shared handle of one transfer; copies mean the same transfer. Every transfer ends exactly
/// once, and once done() is true no byte of local memory moves for it any more. All methods may be
/// called from any thread. A handle may outlive its engine: destroying the engine ends the transfer.
/// An empty handle behaves as a transfer that ended with invalid_argument.
class Transfer {
 public:
  Transfer();
  explicit Transfer(RefPtr<TransferState> state);
  Transfer(const Transfer&);
  Transfer(Transfer&&) noexcept;
  Transfer& operator=(const Transfer&);
  Transfer& operator=(Transfer&&) noexcept;
  ~Transfer();

  /// A transfer that has already ended with `status`.
  static Transfer ended(Status status);

  bool valid() const noexcept { return static_cast<bool>(state_); }
  bool done() const noexcept;
  /// The outcome. Before done() the answer is `invalid_argument`, "the transfer still runs".
  Status status() const;
  /// Bytes that the operation carries, after empty slices are left out; for recv the bytes received.
  std::uint64_t bytes() const noexcept;

  /// Waits until the transfer has ended (its own deadline bounds the wait) and returns the outcome.
  Status wait() const;
  /// Waits at most `limit`; true when the transfer has ended. The transfer itself goes on.
  bool wait_for(Duration limit) const;

  /// Asks for an early end: the transfer ends with `cancelled` once it is quiet, or with its own
  /// outcome if that comes first. Returns at once.
  void cancel() const;

  /// Calls `callback` once with the outcome; at once, on the calling thread, when the transfer has
  /// ended already. Several callbacks may be added. The callback must not throw.
  void on_complete(std::function<void(const Status&)> callback, Dispatch where = Dispatch::offload) const;

  /// `Status status = co_await transfer;` resumes on the engine's callback thread, or goes straight on
  /// when the transfer ends meanwhile. A coroutine that waits must not be destroyed before: cancel, and let it end.
  auto operator co_await() const {
    struct Awaiter {
      Transfer transfer;
      bool await_ready() const noexcept { return transfer.done(); }
      void await_suspend(std::coroutine_handle<> waiter) const {
        transfer.on_complete([waiter](const Status&) { waiter.resume(); });
      }
      Status await_resume() const { return transfer.status(); }
    };
    return Awaiter{*this};
  }

 private:
  RefPtr<TransferState> state_;
};

}  // namespace kvferry
