// Speaks to an engine's control port as another engine would, or as none should.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include <zmq.hpp>

#include <kvferry/runtime/messages.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry::test {

class ControlClient {
 public:
  explicit ControlClient(const std::string& address) : socket_(context_, ZMQ_DEALER) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.connect(address);
  }

  void send(std::string_view bytes) { socket_.send(zmq::buffer(bytes), zmq::send_flags::dontwait); }

  std::optional<ControlMessage> receive(Duration limit) {
    const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
    socket_.set(zmq::sockopt::rcvtimeo, static_cast<int>(milliseconds));
    zmq::message_t body;
    if (!socket_.recv(body)) return std::nullopt;
    auto message = decode({static_cast<const std::byte*>(body.data()), body.size()});
    return message ? std::optional(std::move(*message)) : std::nullopt;
  }

  std::optional<ControlMessage> ask(const ControlMessage& message, Duration limit) {
    send(encode(message));
    return receive(limit);
  }

 private:
  zmq::context_t context_{1};
  zmq::socket_t socket_;
};

}  // namespace kvferry::test
