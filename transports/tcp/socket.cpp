#include "socket.hpp"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

namespace kvferry::tcp {
namespace {

constexpr int listen_backlog = 512;
constexpr int silence_limit_ms = 5000;   // sent bytes not acknowledged for so long: the peer is lost
constexpr int keepalive_idle_s = 2;      // an idle connection is probed after this ...
constexpr int keepalive_interval_s = 1;  // ... every so often ...
constexpr int keepalive_probes = 3;      // ... and lost after so many probes without answer

void set_option(int fd, int level, int name, int value) noexcept {
  ::setsockopt(fd, level, name, &value, sizeof value);
}

// The forced variants pass net.core.{r,w}mem_max but need CAP_NET_ADMIN.
void set_buffer(int fd, int forced, int plain, int bytes) noexcept {
  if (::setsockopt(fd, SOL_SOCKET, forced, &bytes, sizeof bytes) != 0) set_option(fd, SOL_SOCKET, plain, bytes);
}

// Before listen() or connect(): the window scale is agreed on in the first packet.
void set_buffers(int fd, const TcpConfig& config) noexcept {
  if (config.socket_buffer_bytes <= 0) return;
  set_buffer(fd, SO_RCVBUFFORCE, SO_RCVBUF, config.socket_buffer_bytes);
  set_buffer(fd, SO_SNDBUFFORCE, SO_SNDBUF, config.socket_buffer_bytes);
}

Result<Endpoint> numeric_endpoint(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string numeric = host == "localhost" ? "127.0.0.1" : host;
  const int error = ::getaddrinfo(numeric.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    return {Errc::invalid_argument, fmt::format("tcp: '{}' is not a numeric IPv4 or IPv6 address ({}); resolve the "
                                                "name first",
                                                host, ::gai_strerror(error))};
  }
  Endpoint endpoint;
  std::memcpy(&endpoint.storage, found->ai_addr, found->ai_addrlen);
  endpoint.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return endpoint;
}

bool is_wildcard(std::string_view host) { return host == "0.0.0.0" || host == "::" || host == "*" || host.empty(); }

std::string_view without_brackets(std::string_view host) {
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') return host.substr(1, host.size() - 2);
  return host;
}

Result<Fd> stream_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd) return fd;
  const Errc code = errno == EAFNOSUPPORT ? Errc::unsupported : Errc::resource_exhausted;
  return {code, fmt::format("tcp: no socket: {} (open-file limit?)", errno_text(errno))};
}

}  // namespace

void Fd::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

std::string Endpoint::text() const {
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  ::getnameinfo(address(), size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return storage.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Result<Endpoint> resolve(std::string_view address, std::string_view host) {
  const std::size_t colon = address.rfind(':');
  std::uint16_t port = 0;
  if (colon != std::string_view::npos) {
    const char* end = address.data() + address.size();
    const auto parsed = std::from_chars(address.data() + colon + 1, end, port);
    if (parsed.ec != std::errc() || parsed.ptr != end) port = 0;
  }
  if (port == 0) {
    return {Errc::invalid_argument, fmt::format("tcp: the peer's address '{}' is not HOST:PORT", address)};
  }
  std::string_view given = without_brackets(address.substr(0, colon));
  if (is_wildcard(given)) given = without_brackets(host);
  return numeric_endpoint(std::string(given), port);
}

Result<std::pair<Fd, Endpoint>> listen_on(const std::string& host, const TcpConfig& config) {
  const std::string bind_host(is_wildcard(host) && host != "::" ? "0.0.0.0" : without_brackets(host));
  Result<Endpoint> endpoint = numeric_endpoint(bind_host, 0);
  if (!endpoint) return endpoint.status().with_context("data port");
  Result<Fd> fd = stream_socket(endpoint->storage.ss_family);
  if (!fd) return fd.status();
  set_buffers(fd->get(), config);
  if (::bind(fd->get(), endpoint->address(), endpoint->size) != 0 || ::listen(fd->get(), listen_backlog) != 0) {
    const Errc code = errno == EADDRINUSE ? Errc::address_in_use : Errc::invalid_argument;
    return {code, fmt::format("tcp: cannot listen on a port of '{}': {}", bind_host, errno_text(errno))};
  }
  endpoint->size = sizeof endpoint->storage;
  if (::getsockname(fd->get(), reinterpret_cast<sockaddr*>(&endpoint->storage), &endpoint->size) != 0) {
    return {Errc::internal, fmt::format("tcp: getsockname: {}", errno_text(errno))};
  }
  return std::pair(std::move(*fd), *endpoint);
}

Result<Fd> begin_connect(const Endpoint& peer, const TcpConfig& config) {
  Result<Fd> fd = stream_socket(peer.storage.ss_family);
  if (!fd) return fd;
  set_buffers(fd->get(), config);
  tune_connection(fd->get());
  if (::connect(fd->get(), peer.address(), peer.size) != 0 && errno != EINPROGRESS) {
    return {Errc::unreachable, fmt::format("tcp: connect to {}: {}", peer.text(), errno_text(errno))};
  }
  return fd;
}

void tune_connection(int fd) noexcept {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, keepalive_idle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, keepalive_interval_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, keepalive_probes);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, silence_limit_ms);
}

void break_connection(int fd) noexcept {
  const linger abortive{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &abortive, sizeof abortive);
  // Closing would do, were there no copies of the descriptor: this breaks the connection for all of them.
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  ::connect(fd, &nowhere, sizeof nowhere);
}

}  // namespace kvferry::tcp
