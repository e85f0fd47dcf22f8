#include "bench/raw_tcp.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <kvferry/runtime/one_sided.hpp>

namespace kvferry::bench {
namespace {

constexpr int silence_ms = 10'000;
constexpr std::size_t max_iovecs = 1024;  // IOV_MAX of Linux

/// Below this a further socket costs more calls than it brings.
constexpr std::uint64_t least_share_bytes = 64 << 10;

Status failed(std::string_view what) {
  return {Errc::channel_error, fmt::format("floor: {}: {}", what, std::strerror(errno))};
}

Status silent() {
  return {Errc::timed_out, fmt::format("floor: the other side was silent for {} s", silence_ms / 1000)};
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

Status wait_for(int socket, short events) {
  pollfd entry{socket, events, 0};
  const int ready = ::poll(&entry, 1, silence_ms);
  if (ready < 0 && errno != EINTR) return failed("poll");
  return ready == 0 ? silent() : Status::ok();
}

void set_option(int socket, int level, int name, int value) { ::setsockopt(socket, level, name, &value, sizeof value); }

Status prepare(int socket, RawMode mode, int buffer_bytes) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (buffer_bytes > 0) {
    set_option(socket, SOL_SOCKET, SO_SNDBUF, buffer_bytes);
    set_option(socket, SOL_SOCKET, SO_RCVBUF, buffer_bytes);
  }
  if (mode == RawMode::polled) {
    return ::fcntl(socket, F_SETFL, O_NONBLOCK) == 0 ? Status::ok() : failed("O_NONBLOCK");
  }
  const timeval limit{silence_ms / 1000, 0};
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return Status::ok();
}

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Result<Address> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    return Status(Errc::unreachable, fmt::format("floor: {} does not resolve: {}", host, gai_strerror(error)));
  }
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

std::uint64_t total_bytes(std::span<const Slice> slices) {
  std::uint64_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.length;
  return bytes;
}

}  // namespace

void Share::add(std::byte* data, std::uint64_t bytes) { pieces_.push_back({data, bytes}); }

ssize_t Share::move(int socket, Direction direction) {
  iovec& first = pieces_[next_];
  const iovec whole = first;
  first = {static_cast<std::byte*>(whole.iov_base) + skip_, whole.iov_len - skip_};
  const int count = static_cast<int>(std::min(max_iovecs, pieces_.size() - next_));
  const OneSidedAccess access;
  const ssize_t moved = direction == Direction::send ? ::writev(socket, &first, count) : ::readv(socket, &first, count);
  const int error = errno;
  first = whole;
  if (moved > 0) advance(static_cast<std::uint64_t>(moved));
  errno = error;
  return moved;
}

void Share::advance(std::uint64_t bytes) noexcept {
  bytes += skip_;
  while (next_ < pieces_.size() && bytes >= pieces_[next_].iov_len) bytes -= pieces_[next_++].iov_len;
  skip_ = bytes;
}

std::vector<Share> make_shares(std::span<std::byte> region, std::span<const Slice> slices, Side side,
                               std::size_t sockets) {
  const std::uint64_t total = total_bytes(slices);
  const std::uint64_t count = std::clamp<std::uint64_t>(total / least_share_bytes, 1, sockets);
  const std::uint64_t share_bytes = (total + count - 1) / count;
  std::vector<Share> shares(count);
  std::uint64_t placed = 0;
  for (const Slice& slice : slices) {
    for (std::uint64_t offset = 0; offset < slice.length;) {
      const std::uint64_t room = share_bytes - placed % share_bytes;
      const std::uint64_t bytes = std::min(room, slice.length - offset);
      shares[placed / share_bytes].add(region.data() + offset_on(side, slice) + offset, bytes);
      placed += bytes;
      offset += bytes;
    }
  }
  return shares;
}

Result<RawSockets> RawSockets::adopt(std::vector<FileDescriptor> sockets, RawMode mode, int buffer_bytes) {
  for (const FileDescriptor& socket : sockets) {
    if (auto status = prepare(socket.get(), mode, buffer_bytes); !status) return status;
  }
  RawSockets result;
  result.sockets_ = std::move(sockets);
  result.mode_ = mode;
  return result;
}

Result<RawSockets> RawSockets::connect(const std::string& host, int port, std::size_t sockets, RawMode mode,
                                       int buffer_bytes) {
  auto address = resolve(host, port);
  if (!address) return address.status();
  std::vector<FileDescriptor> connected;
  for (std::size_t i = 0; i < sockets; ++i) {
    FileDescriptor socket(::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) return failed("socket");
    set_option(socket.get(), IPPROTO_TCP, TCP_SYNCNT, 3);
    if (::connect(socket.get(), address->get(), address->size) != 0) {
      return failed(fmt::format("connect to {} port {}", host, port));
    }
    connected.push_back(std::move(socket));
  }
  return adopt(std::move(connected), mode, buffer_bytes);
}

Status RawSockets::transmit(std::span<Share> shares, Direction direction) {
  for (Share& share : shares) share.rewind();
  return mode_ == RawMode::blocking ? transmit_blocking(shares, direction) : transmit_polled(shares, direction);
}

Status RawSockets::transmit_blocking(std::span<Share> shares, Direction direction) {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    while (!shares[i].done()) {
      const ssize_t moved = shares[i].move(sockets_[i].get(), direction);
      if (moved > 0 || (moved < 0 && errno == EINTR)) continue;
      if (moved == 0) return {Errc::channel_error, "floor: the other side closed the connection"};
      return would_block() ? silent() : failed("moving bytes");
    }
  }
  return Status::ok();
}

Status RawSockets::transmit_polled(std::span<Share> shares, Direction direction) {
  for (;;) {
    bool moved_any = false;
    bool all_done = true;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (shares[i].done()) continue;
      const ssize_t moved = shares[i].move(sockets_[i].get(), direction);
      if (moved == 0) return {Errc::channel_error, "floor: the other side closed the connection"};
      if (moved < 0 && !would_block() && errno != EINTR) return failed("moving bytes");
      moved_any |= moved > 0;
      all_done &= shares[i].done();
    }
    if (all_done) return Status::ok();
    if (moved_any) continue;
    if (auto status = wait_ready(shares, direction); !status) return status;
  }
}

Status RawSockets::wait_ready(std::span<Share> shares, Direction direction) {
  pollfd entries[64];
  nfds_t count = 0;
  for (std::size_t i = 0; i < shares.size() && count < std::size(entries); ++i) {
    const short events = direction == Direction::send ? POLLOUT : POLLIN;
    if (!shares[i].done()) entries[count++] = {sockets_[i].get(), events, 0};
  }
  const int ready = ::poll(entries, count, silence_ms);
  if (ready < 0 && errno != EINTR) return failed("poll");
  return ready == 0 ? silent() : Status::ok();
}

void RawSockets::shut_down() noexcept {
  for (const FileDescriptor& socket : sockets_) ::shutdown(socket.get(), SHUT_RDWR);
}

Status RawSockets::send_signal() {
  const char signal = 1;
  for (;;) {
    const ssize_t sent = ::send(sockets_.front().get(), &signal, 1, MSG_NOSIGNAL);
    if (sent == 1) return Status::ok();
    if (errno == EINTR) continue;
    if (!would_block()) return failed("sending a request");
    if (auto status = wait_for(sockets_.front().get(), POLLOUT); !status) return status;
  }
}

Status RawSockets::receive_signal() {
  char signal = 0;
  for (;;) {
    const ssize_t got = ::recv(sockets_.front().get(), &signal, 1, 0);
    if (got == 1) return Status::ok();
    if (got == 0) return {Errc::channel_error, "floor: the other side closed the connection"};
    if (errno == EINTR) continue;
    if (!would_block()) return failed("receiving a request");
    if (mode_ == RawMode::blocking) return silent();
    if (auto status = wait_for(sockets_.front().get(), POLLIN); !status) return status;
  }
}

Result<RawListener> RawListener::open(const std::string& host) {
  auto address = resolve(host, 0);
  if (!address) return address.status();
  RawListener listener;
  listener.socket_ =
      FileDescriptor(::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = listener.socket_.get();
  if (fd < 0 || ::bind(fd, address->get(), address->size) != 0 || ::listen(fd, 64) != 0) return failed("listening");
  Address own;
  own.size = sizeof own.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own.storage), &own.size) != 0) return failed("getsockname");
  listener.port_ =
      ntohs(own.storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&own.storage)->sin6_port
                                              : reinterpret_cast<const sockaddr_in*>(&own.storage)->sin_port);
  return listener;
}

Result<std::vector<FileDescriptor>> RawListener::accept(std::size_t sockets) {
  std::vector<FileDescriptor> accepted;
  while (accepted.size() < sockets) {
    if (auto status = wait_for(socket_.get(), POLLIN); !status) return status;
    FileDescriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && !would_block() && errno != EINTR) return failed("accept");
    if (socket) accepted.push_back(std::move(socket));
  }
  return accepted;
}

}  // namespace kvferry::bench
