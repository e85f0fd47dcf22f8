// The target's end of one data connection: greets, then serves requests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <kvferry/transports/transport.hpp>

#include "answer.hpp"
#include "stream.hpp"
#include "wire.hpp"

namespace kvferry::tcp {

class ServerConnection;

/// What a connection needs of the server it belongs to.
class ConnectionHost {
 public:
  virtual ~ConnectionHost() = default;
  virtual const PortContext& context() const = 0;
  virtual PortEvents& events() = 0;
  virtual AnswerPool& answers() = 0;
  /// The hello named a session: the connection no longer counts as a stranger's.
  virtual void on_authenticated(ServerConnection& connection) = 0;
  /// Ends every connection of the channel that the hello names.
  virtual void fence(const Hello& fence) = 0;
  /// The connection is closed; forget it.
  virtual void on_closed(ServerConnection& connection) = 0;
};

class ServerConnection final : public Stream {
 public:
  /// `hello_by`: when the hello must be complete.
  ServerConnection(ConnectionHost& host, Loop& loop, Fd fd, std::string peer, TimePoint hello_by);
  ~ServerConnection() override;

  bool run() override;

  bool authenticated() const noexcept { return authenticated_; }
  SessionId session() const noexcept { return session_; }
  /// Part of the channel that `fence` names.
  bool belongs_to(const Hello& fence) const noexcept {
    return hello_.nonce == fence.nonce && hello_.token == fence.token;
  }
  TimePoint hello_by() const noexcept { return hello_by_; }

  /// True when bytes of the region are being received into or still to be sent.
  bool touches(RegionKey region) const noexcept;
  bool has_stalled() const noexcept { return !stalled_.empty(); }
  /// Offers what found no room before again.
  void retry_stalled();
  /// Closes, telling the peer why where the stream allows it.
  void drop(const Status& why);

  std::size_t index = 0;  ///< where the server keeps it

 protected:
  bool on_part() override;
  void on_sent(Outgoing& message) override;
  void on_broken(const Status& why) override;
  bool may_receive() const override;

 private:
  enum class Await : std::uint8_t { hello_prefix, hello, request, descriptors, payload, refused_payload, message };

  /// An immediate or message that found no room yet.
  struct Stalled {
    std::uint32_t id = 0;
    Op op = Op::send;
    std::uint64_t sequence = 0;
    std::uint32_t immediate = 0;
    std::vector<std::byte> message;
  };

  bool take_hello_prefix();
  bool take_hello();
  bool confirm_fence();
  bool admit();
  bool refuse(const Status& why);
  bool send_reply(const Status& status);
  void expect_request();
  bool take_request();
  bool take_descriptors();
  bool begin_payload(const Status& verdict);
  bool take_payload();
  bool take_message();
  bool descriptors_add_up() const noexcept;
  Status locate();
  Status locate_part(const RegionRecord& record, iovec& part, std::size_t& hint) const;
  bool offer(Stalled offer, std::span<const std::byte> message);
  bool deliver(const Stalled& offer, std::span<const std::byte> message);
  bool same_kind_stalled(Op op) const noexcept;
  bool malformed(const char* what);
  void answer(std::uint32_t id, const Status& status, std::uint64_t payload_bytes = 0);
  void release_answers() noexcept;

  ConnectionHost& host_;
  std::string peer_;
  TimePoint hello_by_;
  bool authenticated_ = false;
  SessionId session_ = 0;
  Hello hello_;
  Await await_ = Await::hello_prefix;
  std::array<std::byte, request_bytes> fixed_;
  Request request_;
  Status verdict_;             // why the payload under way is thrown away
  Answer* current_ = nullptr;  // of the request being received
  std::size_t unsent_answers_ = 0;
  std::vector<std::byte> message_;
  std::deque<Stalled> stalled_;
};

}  // namespace kvferry::tcp
