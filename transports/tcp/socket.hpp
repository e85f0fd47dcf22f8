// Sockets as the TCP transport uses them: addresses, options, listening and connecting.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <sys/socket.h>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry::tcp {

/// Owns a file descriptor.
class Fd {
 public:
  Fd() noexcept = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

/// A numeric IPv4 or IPv6 address with a port.
struct Endpoint {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* address() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
  /// "10.0.0.1:4711" or "[fe80::1]:4711".
  std::string text() const;
};

/// "No such file or directory", thread-safe.
std::string errno_text(int error);

/// The endpoint meant by "HOST:PORT"; a wildcard host is replaced by `host`. Only numeric hosts and
/// "localhost" are understood: a name server must never be waited for on a poller's thread.
Result<Endpoint> resolve(std::string_view address, std::string_view host);

/// A listening socket on a free port of `host`, and where it listens.
Result<std::pair<Fd, Endpoint>> listen_on(const std::string& host, const TcpConfig& config);

/// A socket that has begun to connect; writable (or in error) once that is decided.
Result<Fd> begin_connect(const Endpoint& peer, const TcpConfig& config);

/// Options of every data connection: no delay, keepalive, limits on silence.
void tune_connection(int fd) noexcept;

/// Throws away what the kernel has not sent yet, and tells the peer at once that the connection is gone.
void break_connection(int fd) noexcept;

}  // namespace kvferry::tcp
