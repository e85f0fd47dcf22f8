// Reaching into the memory of another process of this host: for regions that the peer's engine did
// not allocate itself and that can therefore not be mapped.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <sys/types.h>
#include <sys/uio.h>

#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/shm/fd.hpp>
#include <kvferry/transports/shm/protocol.hpp>

namespace kvferry::shm {

/// The two system calls, replaceable by tests.
struct ProcessMemoryCalls {
  using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);
  Call read = ::process_vm_readv;
  Call write = ::process_vm_writev;
};

/// Most pieces of one call (the kernel's UIO_MAXIOV).
inline constexpr std::size_t max_call_pieces = 1024;

/// The process at the other end of a connected unix socket.
class PeerMemory {
 public:
  PeerMemory() = default;

  /// Finds out who the peer is and whether its memory can be reached: reads `nonce` back from
  /// `nonce_address`. When it can not, usable() says why.
  static PeerMemory probe(int socket, std::uint64_t nonce_address, const Nonce& nonce, const ProcessMemoryCalls& calls);

  /// Ok, or no_path with the reason.
  const Status& usable() const noexcept { return usable_; }
  /// -1 where the kernel gives none.
  int pidfd() const noexcept { return pidfd_.get(); }
  pid_t pid() const noexcept { return pid_; }

  /// Copies between `here` and the peer's `there` (equally many, equally long pieces, at most
  /// max_call_pieces); both arrays are used up. The peer is seen to live right before each system
  /// call, so that its number can not have passed to another process unnoticed. Any thread.
  Status copy(bool read, std::span<iovec> here, std::span<iovec> there) const;

 private:
  Status check_alive() const;
  Status explain(int error) const;

  int socket_ = -1;
  pid_t pid_ = 0;
  Fd pidfd_;
  ProcessMemoryCalls calls_;
  Status usable_{Errc::no_path, "the channel is not set up"};
};

}  // namespace kvferry::shm
