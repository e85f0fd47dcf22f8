// The initiator's side of a channel: a bundle of connections and the items in flight on them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

#include "client_socket.hpp"
#include "item.hpp"
#include "wire.hpp"

namespace kvferry::tcp {

class Channel;

/// One connection of a channel.
class ChannelSocket final : public ClientSocket {
 public:
  ChannelSocket(Channel& channel, Loop& loop, Fd fd, const Hello& hello, std::string peer)
      : ClientSocket(loop, std::move(fd), hello, std::move(peer)), channel_(channel), number_(hello.socket_index) {}

  void push(Item& item);
  /// Sends what is queued, as far as the kernel takes it.
  void send_queued() { flush(); }
  /// Withdraws an item of which nothing was sent.
  bool withdraw(Item& item) noexcept;
  /// Its bytes are wanted no longer.
  void abandon(Item& item) noexcept;
  /// Bytes of the items that are not finished, both directions.
  std::uint64_t load() const noexcept { return load_; }

 protected:
  void on_open() override;
  void on_failed(Failure failure, const Status& why) override;
  bool on_open_part() override;
  void on_sent(Outgoing& message) override;

 private:
  enum class Await : std::uint8_t { nothing, response, payload, text };

  void expect_response();
  bool take_response();
  bool begin_payload(Item& item);
  bool begin_text();
  bool take_text();
  void finish(const Status& status);

  Channel& channel_;
  unsigned number_;
  Await await_ = Await::nothing;
  std::array<std::byte, response_bytes> raw_;
  Response response_;
  Item* current_ = nullptr;  // whose payload or text is being received; nullptr: a goodbye's text
  std::string text_;
  std::uint64_t load_ = 0;
};

/// What a channel needs of its port.
class ChannelHost {
 public:
  virtual ~ChannelHost() = default;
  virtual ItemPool& items() = 0;
  virtual void on_up(Channel& channel) = 0;
  virtual void on_completion(std::uint64_t cookie, const Status& status) = 0;
  /// A connection failed: the host must end the channel.
  virtual void on_lost(Channel& channel, const Status& why) = 0;
};

class Channel {
 public:
  /// How an ended channel leaves its items: those that the target may still apply.
  using UnsettledCookies = std::vector<std::uint64_t>;

  Channel(ChannelHost& host, Loop& loop, const TcpConfig& config, ChannelId id, ChannelSpec spec, Endpoint peer);

  /// Begins to connect all sockets.
  Status connect();

  ChannelId id() const noexcept { return id_; }
  const ChannelSpec& spec() const noexcept { return spec_; }
  const Endpoint& endpoint() const noexcept { return endpoint_; }
  const std::string& peer() const noexcept { return peer_; }
  std::uint64_t nonce() const noexcept { return nonce_; }
  bool up() const noexcept { return open_sockets_ == config_.sockets; }

  std::size_t post(std::span<const WorkItem> works);
  void cancel(std::uint64_t cookie);
  /// Closes the sockets: local memory is quiet when this returns. Items that the target can not know
  /// of, and reads, complete with `why`; the cookies of the others are returned.
  UnsettledCookies end(const Status& why);

  // ---- for the sockets
  ItemPool& items() { return host_.items(); }
  void on_socket_open();
  void on_socket_failed(unsigned number, const Status& why);
  /// The item's response was received entirely.
  void complete(Item& item, const Status& status);

 private:
  bool has_room() const noexcept;
  bool take(const WorkItem& work);
  Status check(const WorkItem& work) const;
  ChannelSocket& pick_socket(const WorkItem& work);
  void release(Item& item);

  ChannelHost& host_;
  Loop& loop_;
  const TcpConfig& config_;
  const ChannelId id_;
  const ChannelSpec spec_;
  const Endpoint endpoint_;
  const std::string peer_;
  const std::uint64_t nonce_;
  int open_sockets_ = 0;
  bool ended_ = false;
  std::vector<std::unique_ptr<ChannelSocket>> sockets_;
  std::vector<Item*> in_flight_;
  std::uint64_t bytes_in_flight_ = 0;
};

/// Limits that a port of this configuration gives.
PortLimits limits_of(const TcpConfig& config) noexcept;

}  // namespace kvferry::tcp
