// Plain sockets with writev and readv over scattered memory: what a program without kvferry would
// write, and the floor that kvferry's tcp transport is held against. Both sides use these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sys/uio.h>

#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>

#include "bench/file_descriptor.hpp"
#include "bench/workload.hpp"

namespace kvferry::bench {

/// How one thread serves several sockets.
enum class RawMode : std::uint8_t {
  blocking,  ///< one after the other
  polled     ///< whichever is ready
};

constexpr const char* to_string(RawMode mode) noexcept { return mode == RawMode::blocking ? "blocking" : "polled"; }

enum class Direction : std::uint8_t { send, receive };

/// Scattered memory that passes through one socket, in order. Memory is not owned.
class Share {
 public:
  void add(std::byte* data, std::uint64_t bytes);
  void rewind() noexcept {
    next_ = 0;
    skip_ = 0;
  }
  bool untouched() const noexcept { return next_ == 0 && skip_ == 0; }
  bool done() const noexcept { return next_ == pieces_.size(); }

  /// One system call. Bytes moved, or -1 with errno.
  ssize_t move(int socket, Direction direction);

 private:
  void advance(std::uint64_t bytes) noexcept;

  std::vector<iovec> pieces_;
  std::size_t next_ = 0;
  std::uint64_t skip_ = 0;  ///< bytes of the next piece that have been moved
};

/// Splits the slices, as they lie in `region` on `side`, into at most `sockets` shares of about the
/// same size; fewer when the shares would be smaller than one socket call is worth.
std::vector<Share> make_shares(std::span<std::byte> region, std::span<const Slice> slices, Side side,
                               std::size_t sockets);

/// A set of connected sockets served by the calling thread. Every call waits a few seconds at most
/// for the other side.
class RawSockets {
 public:
  RawSockets() = default;
  /// Takes over connected sockets.
  static Result<RawSockets> adopt(std::vector<FileDescriptor> sockets, RawMode mode, int buffer_bytes);
  static Result<RawSockets> connect(const std::string& host, int port, std::size_t sockets, RawMode mode,
                                    int buffer_bytes);

  std::size_t size() const noexcept { return sockets_.size(); }
  /// Moves share i over socket i, all of them, from their beginnings.
  Status transmit(std::span<Share> shares, Direction direction);
  /// Wakes whoever waits in one of these calls, on either side: they fail from now on. Any thread.
  void shut_down() noexcept;
  /// A byte over the first socket: a request or an acknowledgement.
  Status send_signal();
  Status receive_signal();

 private:
  Status transmit_blocking(std::span<Share> shares, Direction direction);
  Status transmit_polled(std::span<Share> shares, Direction direction);
  Status wait_ready(std::span<Share> shares, Direction direction);

  std::vector<FileDescriptor> sockets_;
  RawMode mode_ = RawMode::blocking;
};

/// Accepts a number of connections on a port of its own.
class RawListener {
 public:
  static Result<RawListener> open(const std::string& host);
  int port() const noexcept { return port_; }
  Result<std::vector<FileDescriptor>> accept(std::size_t sockets);

 private:
  FileDescriptor socket_;
  int port_ = 0;
};

}  // namespace kvferry::bench
