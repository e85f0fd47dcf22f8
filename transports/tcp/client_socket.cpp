#include "client_socket.hpp"

#include <cerrno>

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

namespace kvferry::tcp {

ClientSocket::ClientSocket(Loop& loop, Fd fd, const Hello& hello, std::string peer)
    : Stream(loop, std::move(fd)), hello_(hello), peer_(std::move(peer)) {}

Status ClientSocket::watch() { return loop_.watch(fd_.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *this); }

bool ClientSocket::run() {
  if (!closed() && state_ == State::connecting) {
    if (!writable_ && !hung_up_) return false;
    finish_connect();
  }
  return Stream::run();
}

void ClientSocket::abort() noexcept {
  if (closed()) return;
  break_connection(fd_.get());
  close();
}

void ClientSocket::finish_connect() {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) {
    const Failure failure = error == ECONNREFUSED ? Failure::nobody_listens : Failure::broken;
    return fail(failure, {Errc::unreachable, fmt::format("tcp: connect to {}: {}", peer_, errno_text(error))});
  }
  std::array<std::byte, hello_bytes> hello;
  encode(hello_, hello.data());
  // The socket's buffer is empty: a hello that does not fit means that the connection is gone already.
  if (::send(fd_.get(), hello.data(), hello.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != hello_bytes) {
    return break_off({Errc::channel_error, "hello: " + errno_text(errno)});
  }
  state_ = State::reply;
  in_.expect(raw_reply_.data(), raw_reply_.size());
}

bool ClientSocket::on_part() {
  switch (state_) {
    case State::connecting:
      return malformed("bytes before the hello");
    case State::reply:
      return take_reply();
    case State::reply_text:
      return take_verdict();
    case State::open:
      return on_open_part();
  }
  return false;
}

bool ClientSocket::take_reply() {
  const auto reply = decode_hello_reply(raw_reply_.data());
  if (!reply) return malformed("hello reply");
  reply_ = *reply;
  text_.resize(reply_.text_bytes);
  state_ = State::reply_text;
  in_.expect(reinterpret_cast<std::byte*>(text_.data()), text_.size());
  return true;
}

bool ClientSocket::take_verdict() {
  if (reply_.status != Errc::ok) {
    fail(Failure::refused, {reply_.status, fmt::format("tcp: {} refused the channel: {}", peer_, text_)});
    return false;
  }
  if (reply_.version != protocol_version) {
    fail(Failure::refused, {Errc::version_mismatch, fmt::format("tcp: {} speaks protocol version {}, this side {}",
                                                                peer_, reply_.version, protocol_version)});
    return false;
  }
  state_ = State::open;
  on_open();
  return !closed() && on_open_part();
}

void ClientSocket::on_broken(const Status& why) { on_failed(Failure::broken, why); }

void ClientSocket::fail(Failure failure, const Status& why) {
  if (closed()) return;
  abort();
  on_failed(failure, why);
}

bool ClientSocket::malformed(const char* what) {
  fail(Failure::broken, {Errc::channel_error, fmt::format("malformed {} from the peer", what)});
  return false;
}

}  // namespace kvferry::tcp
