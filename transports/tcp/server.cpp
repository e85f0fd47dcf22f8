#include "server.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <kvferry/runtime/log.hpp>

namespace kvferry::tcp {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t most_strangers = 256;
constexpr Duration hello_limit = 5s;
constexpr Duration accept_pause = 100ms;
constexpr Duration retry_interval = 1ms;
constexpr int accepts_per_run = 16;

constexpr std::uint32_t stream_events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

}  // namespace

Status Server::listen(const TcpConfig& config) {
  auto listening = listen_on(context_.listen_host, config);
  if (!listening) return listening.status();
  listener_ = std::move(listening->first);
  address_ = listening->second.text();
  return loop_.watch(listener_.get(), EPOLLIN, *this);
}

// ---- accepting

void Server::on_events(std::uint32_t /*events*/) { loop_.schedule(*this); }

bool Server::run() {
  for (int i = 0; i < accepts_per_run && accepting_; ++i) {
    if (!accept_one()) break;
  }
  return false;  // level-triggered: what is still waiting is reported again
}

bool Server::accept_one() {
  Endpoint peer;
  peer.size = sizeof peer.storage;
  Fd fd(
      ::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd) {
    accept_trouble_ = false;
    admit(std::move(fd), peer);
    return true;
  }
  if (errno == EAGAIN) return false;
  const bool out_of_something = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  if (out_of_something) pause_accepting(errno);
  return !out_of_something;  // anything else is the trouble of that one connection
}

void Server::admit(Fd fd, const Endpoint& peer) {
  if (strangers_.size() == most_strangers) {
    strangers_.front()->drop({Errc::resource_exhausted, "too many connections without a hello: the oldest must go"});
  }
  tune_connection(fd.get());
  const int raw_fd = fd.get();
  auto connection =
      std::make_unique<ServerConnection>(*this, loop_, std::move(fd), peer.text(), Clock::now() + hello_limit);
  if (!loop_.watch(raw_fd, stream_events, *connection)) return;
  connection->index = connections_.size();
  strangers_.push_back(connection.get());
  connections_.push_back(std::move(connection));
}

void Server::pause_accepting(int error) {
  if (!std::exchange(accept_trouble_, true)) {
    log(LogLevel::warning, fmt::format("tcp: can not accept connections on {}: {}; trying again every 100 ms", address_,
                                       errno_text(error)));
  }
  accepting_ = false;
  accept_again_ = Clock::now() + accept_pause;
  loop_.rewatch(listener_.get(), 0, *this);
}

// ---- connections

void Server::on_authenticated(ServerConnection& connection) { forget_stranger(connection); }

void Server::forget_stranger(const ServerConnection& connection) { std::erase(strangers_, &connection); }

void Server::on_closed(ServerConnection& connection) {
  if (!connection.authenticated()) forget_stranger(connection);
  const std::size_t index = connection.index;
  std::unique_ptr<ServerConnection> closed = std::move(connections_[index]);
  if (index + 1 != connections_.size()) {
    connections_[index] = std::move(connections_.back());
    connections_[index]->index = index;
  }
  connections_.pop_back();
  loop_.bury(std::move(closed));
}

// Backwards: a connection that goes is replaced by the last one, which was looked at already.
template <class Predicate>
void Server::drop_where(Predicate&& predicate, const Status& why) {
  for (std::size_t i = connections_.size(); i-- > 0;) {
    if (predicate(*connections_[i])) connections_[i]->drop(why);
  }
}

void Server::fence(const Hello& fence) {
  const auto of_channel = [&](const ServerConnection& connection) {
    return connection.authenticated() && connection.belongs_to(fence);
  };
  drop_where(of_channel, {Errc::channel_error, "fenced by the initiator"});
}

void Server::drop_session(SessionId session) {
  const auto of_session = [&](const ServerConnection& connection) {
    return connection.authenticated() && connection.session() == session;
  };
  drop_where(of_session, {Errc::channel_error, "the target ended the session"});
}

bool Server::release_region(RegionKey region, bool force) {
  const auto busy = [&](const std::unique_ptr<ServerConnection>& connection) { return connection->touches(region); };
  if (std::ranges::none_of(connections_, busy)) return true;
  if (!force) return false;
  drop_where([&](const ServerConnection& connection) { return connection.touches(region); },
             {Errc::channel_error, "the target withdrew the region while it was in use"});
  return true;
}

// ---- time

void Server::retry_stalled() {
  bool any = false;
  for (std::size_t i = connections_.size(); i-- > 0;) {
    if (!connections_[i]->has_stalled()) continue;
    any = true;
    connections_[i]->retry_stalled();
  }
  last_retry_ = any ? Clock::now() : TimePoint();
}

bool Server::has_timers() const noexcept { return !strangers_.empty() || !accepting_; }

void Server::run_timers(TimePoint now) {
  while (!strangers_.empty() && strangers_.front()->hello_by() <= now) {
    strangers_.front()->drop({Errc::timed_out, "no complete hello within 5 s"});
  }
  if (!accepting_ && accept_again_ <= now) {
    accepting_ = true;
    loop_.rewatch(listener_.get(), EPOLLIN, *this);
  }
}

TimePoint Server::next_wakeup() const noexcept {
  TimePoint next = TimePoint::max();
  if (!strangers_.empty()) next = std::min(next, strangers_.front()->hello_by());
  if (!accepting_) next = std::min(next, accept_again_);
  const auto stalled = [](const std::unique_ptr<ServerConnection>& connection) { return connection->has_stalled(); };
  if (std::ranges::any_of(connections_, stalled)) next = std::min(next, last_retry_ + retry_interval);
  return next;
}

}  // namespace kvferry::tcp
