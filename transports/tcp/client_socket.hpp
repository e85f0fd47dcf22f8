// The initiator's end of one connection, up to the target's answer to the hello.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "stream.hpp"
#include "wire.hpp"

namespace kvferry::tcp {

class ClientSocket : public Stream {
 public:
  enum class Failure : std::uint8_t {
    broken,          ///< the connection broke, or what came was malformed
    nobody_listens,  ///< the host answered that nothing listens there
    refused          ///< the target answered the hello with an error
  };

  /// `fd` has begun to connect to `peer`; the socket is not in the loop yet.
  ClientSocket(Loop& loop, Fd fd, const Hello& hello, std::string peer);

  Status watch();
  bool run() override;
  const std::string& peer() const noexcept { return peer_; }
  /// Ends it: what the kernel has not sent is thrown away. No more calls follow.
  void abort() noexcept;

 protected:
  /// The target accepted the hello.
  virtual void on_open() = 0;
  /// At most once, the socket is closed already.
  virtual void on_failed(Failure failure, const Status& why) = 0;
  /// A part of the stream after the hello's reply is complete, or (first) nothing is expected yet.
  virtual bool on_open_part() = 0;

  bool on_part() override;
  void on_broken(const Status& why) override;
  void fail(Failure failure, const Status& why);
  bool malformed(const char* what);

 private:
  enum class State : std::uint8_t { connecting, reply, reply_text, open };

  void finish_connect();
  bool take_reply();
  bool take_verdict();

  Hello hello_;
  std::string peer_;
  State state_ = State::connecting;
  std::array<std::byte, hello_reply_bytes> raw_reply_;
  HelloReply reply_;
  std::string text_;
};

}  // namespace kvferry::tcp
