#include "stream.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <kvferry/runtime/one_sided.hpp>

namespace kvferry::tcp {
namespace {

// Bounds on one run() of one stream, so that a fast peer does not keep the others waiting.
constexpr int receives_per_run = 8;
constexpr int sends_per_flush = 16;

// Parts shorter than this are received through the staging buffer together with what follows them.
constexpr std::uint64_t direct_threshold = 4096;

// Most bytes described to one system call: enough to never be the limit, small enough to build fast.
constexpr std::size_t call_bytes = 64 << 20;

ssize_t send_parts(int fd, const msghdr& header) noexcept {
  const OneSidedAccess access;
  return ::sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

// ---- SendQueue

void SendQueue::push(Outgoing& message) noexcept {
  message.next = nullptr;
  message.begun = false;
  (first_ == nullptr ? first_ : last_->next) = &message;
  last_ = &message;
  if (unsent_ == nullptr) unsent_ = &message;
}

bool SendQueue::remove(const Outgoing& message) noexcept {
  if (message.begun) return false;
  Outgoing* before = nullptr;
  Outgoing* at = first_;
  for (; at != nullptr && at != &message; at = at->next) before = at;
  if (at == nullptr) return false;
  (before == nullptr ? first_ : before->next) = message.next;
  if (last_ == at) last_ = before;
  if (unsent_ == at) unsent_ = message.next;
  return true;
}

std::size_t SendQueue::gather(std::span<iovec> scratch) noexcept {
  std::size_t count = 0;
  std::size_t bytes = 0;
  const std::size_t most = std::min<std::size_t>(scratch.size(), IOV_MAX);
  for (const Outgoing* message = unsent_; message != nullptr; message = message->next) {
    for (const iovec* part = message->at; part != message->end; ++part) {
      if (count == most || bytes >= call_bytes) return count;
      bytes += part->iov_len;
      scratch[count++] = *part;
    }
  }
  return count;
}

void SendQueue::advance(std::size_t bytes) noexcept {
  while (unsent_ != nullptr) {
    unsent_->begun = true;
    while (unsent_->at != unsent_->end && bytes >= unsent_->at->iov_len) bytes -= unsent_->at++->iov_len;
    if (unsent_->at != unsent_->end) break;
    unsent_ = unsent_->next;
    if (bytes == 0) return;
  }
  if (bytes == 0 || unsent_ == nullptr) return;
  unsent_->at->iov_base = static_cast<std::byte*>(unsent_->at->iov_base) + bytes;
  unsent_->at->iov_len -= bytes;
}

SendQueue::Outcome SendQueue::flush(int fd, std::span<iovec> scratch) noexcept {
  for (int call = 0; call < sends_per_flush; ++call) {
    if (unsent_ == nullptr) return Outcome::drained;
    msghdr header{};
    header.msg_iov = scratch.data();
    header.msg_iovlen = gather(scratch);
    const ssize_t sent = send_parts(fd, header);
    if (sent >= 0) {
      advance(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      return Outcome::blocked;
    } else if (errno != EINTR) {
      return Outcome::failed;
    }
  }
  return unsent_ == nullptr ? Outcome::drained : Outcome::unfinished;
}

Outgoing* SendQueue::pop_sent() noexcept { return first_ == unsent_ ? nullptr : pop(); }

Outgoing* SendQueue::pop() noexcept {
  Outgoing* popped = first_;
  if (popped == nullptr) return nullptr;
  if (unsent_ == popped) unsent_ = popped->next;
  first_ = popped->next;
  if (first_ == nullptr) last_ = nullptr;
  return popped;
}

// ---- Inbox

void Inbox::expect(std::byte* to, std::size_t bytes) noexcept {
  single_ = {to, bytes};
  expect(std::span(&single_, 1), bytes);
}

void Inbox::expect(std::span<iovec> parts, std::uint64_t bytes) noexcept {
  parts_ = parts;
  left_ = bytes;
  discarding_ = false;
}

void Inbox::expect_nothing_kept(std::uint64_t bytes) noexcept {
  left_ = bytes;
  discarding_ = true;
}

void Inbox::advance(std::uint64_t bytes) noexcept {
  left_ -= bytes;
  if (discarding_) return;
  while (bytes > 0 && bytes >= parts_.front().iov_len) {
    bytes -= parts_.front().iov_len;
    parts_ = parts_.subspan(1);
  }
  if (bytes == 0) return;
  iovec& part = parts_.front();
  part.iov_base = static_cast<std::byte*>(part.iov_base) + bytes;
  part.iov_len -= bytes;
}

std::size_t Inbox::feed(std::span<const std::byte> staged) noexcept {
  std::size_t used = 0;
  while (used < staged.size() && left_ > 0) {
    const std::uint64_t part_bytes = discarding_ ? left_ : parts_.front().iov_len;
    const std::size_t bytes = std::min<std::uint64_t>(part_bytes, staged.size() - used);
    if (!discarding_) {
      const OneSidedAccess access;
      std::memcpy(parts_.front().iov_base, staged.data() + used, bytes);
    }
    advance(bytes);
    used += bytes;
  }
  return used;
}

// ---- Stream

void Stream::on_events(std::uint32_t events) {
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) readable_ = true;
  if ((events & EPOLLOUT) != 0) writable_ = true;
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) hung_up_ = true;
  loop_.schedule(*this);
}

bool Stream::run() {
  if (!closed()) receive();
  if (!closed()) flush();
  if (closed()) return false;
  return (readable_ && may_receive()) || (writable_ && !out_.empty());
}

void Stream::flush() {
  if (!writable_ || out_.empty()) return;
  const SendQueue::Outcome outcome = out_.flush(fd_.get(), loop_.iovecs());
  if (outcome == SendQueue::Outcome::blocked) writable_ = false;
  if (outcome == SendQueue::Outcome::failed) return break_off({Errc::channel_error, "send: " + errno_text(errno)});
  while (Outgoing* sent = out_.pop_sent()) on_sent(*sent);
}

void Stream::receive() {
  for (int call = 0; call < receives_per_run; ++call) {
    if (closed() || !readable_ || !may_receive()) return;
    if (!(in_.discarding() ? fill_discarding() : fill())) return;
  }
}

bool Stream::fill() {
  std::size_t direct = 0;
  std::size_t asked = 0;
  const ssize_t count = read_parts(direct, asked);
  return count > 0 ? received(count, direct, asked) : no_data(count);
}

// Reads into the expected parts and, behind them, into the staging buffer: the end of one payload and
// the next header cost one call.
ssize_t Stream::read_parts(std::size_t& direct, std::size_t& asked) {
  auto& staging = loop_.staging();
  if (in_.left() < direct_threshold) {
    asked = staging.size();
    return ::recv(fd_.get(), staging.data(), staging.size(), MSG_DONTWAIT);
  }
  auto& iovecs = loop_.iovecs();
  std::size_t count = 0;
  for (const iovec& part : in_.parts()) {
    if (count == IOV_MAX || direct >= call_bytes) break;
    iovecs[count++] = part;
    direct += part.iov_len;
  }
  asked = direct;
  if (direct == in_.left() && count < IOV_MAX) {
    iovecs[count++] = {staging.data(), staging.size()};
    asked += staging.size();
  }
  const OneSidedAccess access;
  return ::readv(fd_.get(), iovecs.data(), static_cast<int>(count));
}

bool Stream::received(ssize_t count, std::size_t direct, std::size_t asked) {
  const auto bytes = static_cast<std::size_t>(count);
  loop_.favour(*this, bytes);
  const std::size_t placed = std::min(bytes, direct);
  in_.advance(placed);
  // A short read that reached the staging buffer emptied the socket. One that ended earlier may also
  // mean memory that can not be written: the next call tells.
  if (bytes >= direct && bytes < asked && !hung_up_) readable_ = false;
  return distribute(std::span(loop_.staging()).first(bytes - placed));
}

bool Stream::distribute(std::span<const std::byte> staged) {
  for (;;) {
    staged = staged.subspan(in_.feed(staged));
    if (!in_.complete()) return true;
    if (!on_part() || closed()) return false;
  }
}

bool Stream::fill_discarding() {
  const std::size_t most = std::min<std::uint64_t>(in_.left(), call_bytes);
  // MSG_TRUNC on TCP drops the bytes inside the kernel.
  const ssize_t count = ::recv(fd_.get(), nullptr, most, MSG_DONTWAIT | MSG_TRUNC);
  if (count <= 0) return no_data(count);
  in_.advance(static_cast<std::uint64_t>(count));
  return distribute({});
}

bool Stream::no_data(ssize_t count) {
  if (count == 0) {
    break_off({Errc::channel_error, "the peer closed the connection"});
  } else if (errno == EAGAIN) {
    readable_ = false;
  } else if (errno != EINTR) {
    break_off({Errc::channel_error, "receive: " + errno_text(errno)});
  }
  return false;
}

void Stream::break_off(const Status& why) {
  if (closed()) return;
  close();
  on_broken(why);
}

void Stream::close() noexcept {
  if (!fd_) return;
  loop_.unwatch(fd_.get());
  // Copies of the descriptor in children of fork() must not keep the connection alive.
  ::shutdown(fd_.get(), SHUT_RDWR);
  fd_.reset();
}

}  // namespace kvferry::tcp
