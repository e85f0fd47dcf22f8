#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <kvferry/transports/shm/unix_socket.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry::shm {
namespace {

constexpr int listen_backlog = 256;
/// Room for several of the largest messages, so that one send seldom has to be queued on our side.
constexpr int send_buffer_bytes = 1 << 20;

struct Address {
  sockaddr_un storage{};
  socklen_t size = 0;
};

Result<Address> abstract_address(const std::string& name) {
  Address address;
  if (name.empty() || name.size() >= sizeof address.storage.sun_path)
    return {Errc::invalid_argument, fmt::format("shm: '{}' is no socket name: 1 to {} characters are possible", name,
                                                sizeof address.storage.sun_path - 1)};
  address.storage.sun_family = AF_UNIX;
  std::memcpy(address.storage.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Result<Fd> open_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket)
    return {Errc::resource_exhausted, fmt::format("shm: no unix socket can be opened: {}", std::strerror(errno))};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof send_buffer_bytes);
  return socket;
}

Status connect_error(const std::string& name, int error) {
  if (error == ECONNREFUSED)
    return {Errc::unreachable,
            fmt::format("shm: nobody listens on the abstract socket '{}' in this network namespace: the peer's engine "
                        "has ended, or it runs in another network namespace (a container with a network of its own), "
                        "where only tcp reaches it",
                        name)};
  return {Errc::unreachable,
          fmt::format("shm: connecting to the abstract socket '{}': {}", name, std::strerror(error))};
}

IoResult failed_io() { return errno == EAGAIN || errno == EWOULDBLOCK ? IoResult::again : IoResult::closed; }

/// Takes every descriptor out of a received message, so that none is lost however many came.
std::size_t take_descriptors(msghdr& message, Fd& first) {
  std::size_t count = 0;
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t here = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < here; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(control) + i * sizeof(int), sizeof number);
      Fd owned(number);
      if (count++ == 0) first = std::move(owned);
    }
  }
  return count;
}

IoResult receive(int socket, std::span<std::byte> buffer, std::span<std::byte>& received, msghdr& message) {
  iovec part{buffer.data(), buffer.size()};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  ssize_t bytes = 0;
  do {
    bytes = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) return failed_io();
  received = buffer.first(static_cast<std::size_t>(bytes));
  // An empty packet looks like the end of the connection, and nobody who speaks our protocol sends one.
  return bytes == 0 ? IoResult::closed : IoResult::done;
}

}  // namespace

Result<std::string> random_socket_name() {
  std::array<std::uint64_t, 2> random{};
  if (::getrandom(random.data(), sizeof random, 0) != sizeof random)
    return {Errc::unsupported, fmt::format("shm: the kernel gives no random numbers: {}", std::strerror(errno))};
  return fmt::format("kvferry-shm-{:016x}{:016x}", random[0], random[1]);
}

Result<Fd> listen_at(const std::string& name) {
  Result<Address> address = abstract_address(name);
  if (!address) return address.status();
  Result<Fd> socket = open_socket();
  if (!socket) return socket.status();
  if (::bind(socket->get(), reinterpret_cast<const sockaddr*>(&address->storage), address->size) != 0)
    return {errno == EADDRINUSE ? Errc::address_in_use : Errc::resource_exhausted,
            fmt::format("shm: binding the abstract socket '{}': {}", name, std::strerror(errno))};
  if (::listen(socket->get(), listen_backlog) != 0)
    return {Errc::resource_exhausted,
            fmt::format("shm: listening on the abstract socket '{}': {}", name, std::strerror(errno))};
  return socket;
}

Result<Fd> connect_to(const std::string& name) {
  Result<Address> address = abstract_address(name);
  if (!address) return address.status();
  Result<Fd> socket = open_socket();
  if (!socket) return socket.status();
  if (::connect(socket->get(), reinterpret_cast<const sockaddr*>(&address->storage), address->size) == 0) return socket;
  if (errno == EAGAIN || errno == EINTR) return Fd();
  return connect_error(name, errno);
}

IoResult send_packet(int socket, std::span<const std::byte> head, std::span<const std::byte> body, int passed) {
  std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(head.data()), head.size()},
                             iovec{const_cast<std::byte*>(body.data()), body.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = body.empty() ? 1 : 2;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (passed >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &passed, sizeof passed);
  }
  ssize_t bytes = 0;
  do {
    bytes = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (bytes < 0 && errno == EINTR);
  // ETOOMANYREFS and ENOBUFS: too many descriptors or bytes are in flight just now.
  if (bytes < 0 && (errno == ETOOMANYREFS || errno == ENOBUFS)) return IoResult::again;
  return bytes < 0 ? failed_io() : IoResult::done;
}

IoResult receive_packet(int socket, std::span<std::byte> buffer, std::span<std::byte>& received) {
  msghdr message{};
  const IoResult result = receive(socket, buffer, received, message);
  if (result == IoResult::done && (message.msg_flags & MSG_TRUNC) != 0) return IoResult::bad;
  return result;
}

IoResult receive_packet(int socket, std::span<std::byte> buffer, std::span<std::byte>& received, Fd& passed) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const IoResult result = receive(socket, buffer, received, message);
  if (result != IoResult::done) return result;
  const bool several = take_descriptors(message, passed) > 1;
  return several || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ? IoResult::bad : IoResult::done;
}

bool hung_up(int socket) {
  pollfd look{socket, POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace kvferry::shm
