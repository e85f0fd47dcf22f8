// A non-blocking byte stream that sends frames gathered from memory and receives parts scattered to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <sys/uio.h>

#include <kvferry/runtime/status.hpp>

#include "loop.hpp"
#include "socket.hpp"

namespace kvferry::tcp {

/// One message on its way out: [at, end) is what is left of it. Owned by whoever queued it.
struct Outgoing {
  Outgoing* next = nullptr;
  iovec* at = nullptr;
  iovec* end = nullptr;
  bool begun = false;  ///< some of its bytes are with the kernel
};

/// Messages in order, sent with as few system calls as the kernel allows.
class SendQueue {
 public:
  enum class Outcome : std::uint8_t { drained, blocked, unfinished, failed };

  bool empty() const noexcept { return unsent_ == nullptr; }
  void push(Outgoing& message) noexcept;
  /// Takes back a message of which nothing was sent; false when that is not so.
  bool remove(const Outgoing& message) noexcept;
  /// Sends a bounded portion; failed leaves errno.
  Outcome flush(int fd, std::span<iovec> scratch) noexcept;
  /// The next message that is with the kernel entirely, or nullptr.
  Outgoing* pop_sent() noexcept;
  /// The next message however far it is, or nullptr: for emptying the queue of a closed socket.
  Outgoing* pop() noexcept;
  /// Start of the list of queued messages.
  const Outgoing* first() const noexcept { return first_; }

 private:
  std::size_t gather(std::span<iovec> scratch) noexcept;
  void advance(std::size_t bytes) noexcept;

  Outgoing* first_ = nullptr;   // oldest message not popped
  Outgoing* unsent_ = nullptr;  // oldest message with bytes left
  Outgoing* last_ = nullptr;
};

/// The part of the incoming stream that is expected now.
class Inbox {
 public:
  void expect(std::byte* to, std::size_t bytes) noexcept;
  /// `parts` are used up in place and must stay where they are.
  void expect(std::span<iovec> parts, std::uint64_t bytes) noexcept;
  void expect_nothing_kept(std::uint64_t bytes) noexcept;
  /// From now on what is left of the part is thrown away.
  void discard_rest() noexcept { discarding_ = true; }

  bool complete() const noexcept { return left_ == 0; }
  bool discarding() const noexcept { return discarding_; }
  std::uint64_t left() const noexcept { return left_; }
  std::span<const iovec> parts() const noexcept { return parts_; }

  /// Notes that `bytes` arrived where parts() says (or were thrown away).
  void advance(std::uint64_t bytes) noexcept;
  /// Copies from staged bytes; returns how many were used.
  std::size_t feed(std::span<const std::byte> staged) noexcept;

 private:
  iovec single_{};
  std::span<iovec> parts_;
  std::uint64_t left_ = 0;
  bool discarding_ = false;
};

class Stream : public Watched {
 public:
  Stream(Loop& loop, Fd fd) noexcept : loop_(loop), fd_(std::move(fd)) {}
  ~Stream() override { close(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void on_events(std::uint32_t events) override;
  bool run() override;
  bool closed() const noexcept { return !fd_; }

 protected:
  /// The expected part is complete: handle it and expect the next. False ends this reading.
  virtual bool on_part() = 0;
  /// A queued message is entirely with the kernel.
  virtual void on_sent(Outgoing& message) = 0;
  /// The stream broke (the socket is closed already). Called at most once.
  virtual void on_broken(const Status& why) = 0;
  /// False stops reading for now; asked again in every run().
  virtual bool may_receive() const { return true; }

  /// Sends what it can at once.
  void flush();
  void receive();
  void break_off(const Status& why);
  /// Closes without on_broken.
  void close() noexcept;

  Loop& loop_;
  Fd fd_;
  Inbox in_;
  SendQueue out_;
  bool readable_ = false;
  bool writable_ = false;
  bool hung_up_ = false;  ///< epoll reported an error or the peer's end of the stream

 private:
  /// One system call; false when there is nothing more to read now.
  bool fill();
  bool fill_discarding();
  ssize_t read_parts(std::size_t& direct, std::size_t& asked);
  bool received(ssize_t count, std::size_t direct, std::size_t asked);
  bool no_data(ssize_t count);
  bool distribute(std::span<const std::byte> staged);
};

}  // namespace kvferry::tcp
