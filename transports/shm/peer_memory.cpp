#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <kvferry/transports/shm/peer_memory.hpp>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace kvferry::shm {
namespace {

constexpr short hang_up_events = POLLHUP | POLLRDHUP | POLLERR | POLLNVAL;

/// A handle of the process that stays its own even when its number is given to another.
Fd open_pidfd(int socket, pid_t pid) {
  int number = -1;
  socklen_t size = sizeof number;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &number, &size) == 0) return Fd(number);
  // Before Linux 6.5 it is opened by number; the nonce, read afterwards, shows whether it is the peer.
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

iovec* skip(std::span<iovec> pieces, std::size_t bytes) {
  iovec* piece = pieces.data();
  iovec* const end = piece + pieces.size();
  while (piece != end && bytes >= piece->iov_len) bytes -= (piece++)->iov_len;
  if (piece != end) {
    piece->iov_base = static_cast<char*>(piece->iov_base) + bytes;
    piece->iov_len -= bytes;
  }
  return piece;
}

std::size_t total_of(std::span<const iovec> pieces) {
  std::size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

}  // namespace

PeerMemory PeerMemory::probe(int socket, std::uint64_t nonce_address, const Nonce& nonce,
                             const ProcessMemoryCalls& calls) {
  PeerMemory peer;
  peer.socket_ = socket;
  peer.calls_ = calls;
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 || credentials.pid <= 0) {
    peer.usable_ = {Errc::no_path, "the peer's process is not visible here (another pid namespace)"};
    return peer;
  }
  peer.pid_ = credentials.pid;
  peer.pidfd_ = open_pidfd(socket, peer.pid_);

  Nonce seen{};
  iovec here{seen.data(), seen.size()};
  iovec there{reinterpret_cast<void*>(static_cast<std::uintptr_t>(nonce_address)), seen.size()};
  peer.usable_ = peer.copy(true, {&here, 1}, {&there, 1});
  if (peer.usable_ && seen != nonce)
    peer.usable_ = {Errc::no_path, fmt::format("process {} is not the peer's", peer.pid_)};
  if (!peer.usable_ && !(peer.usable_ == Errc::no_path))
    peer.usable_ = {Errc::no_path, std::string(peer.usable_.text())};
  return peer;
}

Status PeerMemory::copy(bool read, std::span<iovec> here, std::span<iovec> there) const {
  const ProcessMemoryCalls::Call call = read ? calls_.read : calls_.write;
  std::size_t left = total_of(here);
  while (left > 0) {
    if (Status alive = check_alive(); !alive) return alive;
    const ssize_t moved = call(pid_, here.data(), here.size(), there.data(), there.size(), 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return explain(moved < 0 ? errno : EFAULT);
    left -= static_cast<std::size_t>(moved);
    here = here.subspan(static_cast<std::size_t>(skip(here, static_cast<std::size_t>(moved)) - here.data()));
    there = there.subspan(static_cast<std::size_t>(skip(there, static_cast<std::size_t>(moved)) - there.data()));
  }
  return {};
}

Status PeerMemory::check_alive() const {
  // poll leaves out negative descriptors.
  std::array<pollfd, 2> looks{pollfd{socket_, POLLRDHUP, 0}, pollfd{pidfd_.get(), POLLIN, 0}};
  if (::poll(looks.data(), looks.size(), 0) > 0 && ((looks[0].revents & hang_up_events) != 0 || looks[1].revents != 0))
    return {Errc::channel_error, fmt::format("process {} has ended or closed the channel", pid_)};
  return {};
}

Status PeerMemory::explain(int error) const {
  if (error == ESRCH && usable_) return {Errc::channel_error, fmt::format("process {} has ended", pid_)};
  switch (error) {
    case EPERM:
    case EACCES:
      return {Errc::no_path,
              fmt::format("the kernel refuses access to the memory of process {} (EPERM): it belongs to another user "
                          "or is not dumpable, or ptrace is restricted (kernel.yama.ptrace_scope, or a container "
                          "without CAP_SYS_PTRACE)",
                          pid_)};
    case ESRCH:
      return {
          Errc::no_path,
          fmt::format("process {} is not visible here (ESRCH): it has ended or lives in another pid namespace", pid_)};
    case ENOSYS:
      return {Errc::no_path, "the kernel does not offer process_vm_readv (ENOSYS), or a filter hides it"};
    case ENOMEM:
      return {Errc::resource_exhausted, fmt::format("the kernel has no memory to reach process {}", pid_)};
    default:
      return {Errc::invalid_argument,
              fmt::format("memory here or in process {} is not mapped any more, or not for this access ({}): was it "
                          "freed while registered?",
                          pid_, std::strerror(error))};
  }
}

}  // namespace kvferry::shm
